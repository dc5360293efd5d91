"""Asks the scheduler for its status: one question at a time, however many viewers there are."""

import asyncio
from collections.abc import Callable

import msgspec

from headrace.core.messages.frontend import AnyFrontendRequest, QueryStatus
from headrace.core.messages.replies import StatusReply
from headrace.core.runtime.clock import Clock
from headrace.core.status import SchedulerStatus

TIMEOUT_S = 1.0
FRESH_S = 0.2  # in which an answer is good for the next viewer, too
LISTED_REQUESTS = 40


class KnownStatus(msgspec.Struct, frozen=True):
    """The scheduler's last answer."""

    status: SchedulerStatus
    age_s: float
    """Seconds since it came."""


class StatusQuery:
    """post: sends to the scheduler, whose answers have to be passed to take()."""

    def __init__(self, post: Callable[[AnyFrontendRequest], None], clock: Clock, timeout_s: float = TIMEOUT_S) -> None:
        self._post = post
        self._clock = clock
        self._timeout_s = timeout_s
        self._token = 0
        self._answer: asyncio.Future[None] | None = None
        self._status = SchedulerStatus()
        self._taken: float | None = None

    async def ask(self) -> KnownStatus | None:
        """The status as of now; an earlier one if the scheduler does not answer in time, None if it never has."""
        if self._taken is None or self._clock.now() - self._taken > FRESH_S:
            if self._answer is None:
                self._token += 1
                self._answer = asyncio.get_running_loop().create_future()
                self._post(QueryStatus(token=self._token, requests=LISTED_REQUESTS))
            await asyncio.wait((self._answer,), timeout=self._timeout_s)
        return self.last()

    def last(self) -> KnownStatus | None:
        """The last answer, without a question."""
        if self._taken is None:
            return None
        return KnownStatus(self._status, self._clock.now() - self._taken)

    def take(self, reply: StatusReply) -> None:
        """The scheduler's answer, which may come long after the question."""
        self._status, self._taken = reply.status, self._clock.now()
        if self._answer is not None and reply.token == self._token:
            self._answer.set_result(None)
            self._answer = None
