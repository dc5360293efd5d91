"""Prompts that move to another prefill server when one refuses or fails them, before their first token.

choice ─► attempt ─► result
   ▲         └─► error ─► no reason to move, tokens are out, no server left: the request fails
   └─────────────────┴─► a reason: the same prompt under a new ticket, with the time that is left

What decides is in headrace.server.routing.failover.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from headrace.core.runtime.clock import Clock
from headrace.core.runtime.rate_limit import LogThrottle, printable
from headrace.core.types.errors import DEADLINE, ErrorInfo, HeadraceError
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.routing.failover import MoveReason, PrefillAttempts, PrefillFailure
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool

log = logging.getLogger(__name__)

LOG_EVERY_S = 1.0  # for one server and one reason
REFUSALS: tuple[MoveReason, ...] = ("unreachable", "overloaded", "unavailable")  # it has not had the prompt

Result = TypeVar("Result")


class PromptServers:
    """The prefill servers that one prompt is at, and those that have refused or failed it: none gets it again."""

    def __init__(self, pool: PrefillPool) -> None:
        self._pool = pool
        self._at: list[str] = []
        self.attempts = PrefillAttempts()
        """Those that have refused or failed it."""

    @contextmanager
    def choose(self, request: GenerationRequest) -> Iterator[PrefillChoice]:
        """The next server, which has the prompt while the context lasts, see PrefillPool.chosen()."""
        images = [image.input for image in request.images]
        tried, needs, salt = self._tried, request.needs, request.terms.prefix_salt
        with self._pool.chosen(request.prompt, salt, images, tried=tried, needs=needs, prefer=request.prefer) as choice:
            self._at.append(choice.server.url)
            try:
                yield choice
            finally:
                self._at.remove(choice.server.url)

    def has_other(self, request: GenerationRequest) -> bool:
        """Whether there is a next one."""
        return self._pool.has_other(self._tried, request.needs)

    def failed(self, choice: PrefillChoice, error: ErrorInfo) -> None:
        """A server, or the KV from it, has failed the prompt: for a moment, later ones go elsewhere if they can. Does
        nothing for the same error again, which may be another server's by now, nor for errors of the request."""
        if not error.at_prefill or any(failure.error is error for failure in self.attempts.failures):
            return
        failure = self.attempts.failed(choice.server.url, error)
        if failure.reason is not None:
            self._pool.avoid(choice, error, failure.reason)

    @property
    def _tried(self) -> list[str]:
        return [*self._at, *self.attempts.servers]


Attempt = Callable[[GenerationRequest, PrefillChoice, PromptServers], Awaitable[Result]]
"""Runs a request with the chosen server, the last one of its servers. Raises HeadraceError."""


class PrefillFailover:
    """Runs requests with one prefill server after the other, and counts and logs those that are moved."""

    def __init__(self, pool: PrefillPool, metrics: FrontMetrics, clock: Clock) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._logged = LogThrottle(LOG_EVERY_S)

    async def run(
        self, request: GenerationRequest, arrived: float, has_begun: Callable[[], bool], attempt: Attempt[Result]
    ) -> Result:
        """The result of the first attempt that succeeds. arrived: the time of the request's arrival. has_begun: whether
        a token of it is out. Raises HeadraceError with what the last server said, or all of them.

        Nothing here waits between two attempts: the request stays known under its rid.
        """
        servers, left = PromptServers(self._pool), request
        attempts = servers.attempts
        moved, outcome = False, "cancelled"
        try:
            while (result := await self._attempt(left, servers, attempt)) is None:
                if has_begun() or not attempts.may_move or not servers.has_other(request):
                    self._log(logging.INFO, request, attempts.failures[-1], "failed at prefill server %s")
                    raise HeadraceError(attempts.error())
                left = remaining(request, self._clock.now() - arrived, attempts.failures)
                self._moved(request, attempts.failures[-1])
                moved = True
            outcome = "finished"
            return result
        except HeadraceError as error:
            outcome = "failed"
            if error.info.code == DEADLINE and moved:
                raise HeadraceError(_deadline_error(request)) from error
            raise
        finally:
            if moved:
                self._metrics.count_retried_request(outcome)

    async def _attempt(
        self, request: GenerationRequest, servers: PromptServers, attempt: Attempt[Result]
    ) -> Result | None:
        """The result; None if the chosen server, or the KV from it, failed the request. Raises HeadraceError for all
        other failures."""
        with servers.choose(request) as choice:
            try:
                return await attempt(request, choice, servers)
            except HeadraceError as error:
                if not error.info.at_prefill:
                    raise
                servers.failed(choice, error.info)
        return None

    def _moved(self, request: GenerationRequest, failure: PrefillFailure) -> None:
        """Count and log that a request leaves a server."""
        assert failure.reason is not None, "only then it is moved"
        self._metrics.count_retry(failure.reason)
        self._log(logging.WARNING, request, failure, "moved from prefill server %s to another one")

    def _log(self, level: int, request: GenerationRequest, failure: PrefillFailure, what: str) -> None:
        """what: what has become of the request, with a %s for the server."""
        reason = failure.reason or failure.error.code
        if self._logged.due(f"{what} {failure.server} {reason}", self._clock.now()):
            text = printable(failure.error.message)
            log.log(level, f"%s: {what} (%s: %s)", printable(request.rid), failure.server, printable(reason), text)


def remaining(
    request: GenerationRequest, elapsed_s: float, failures: Iterable[PrefillFailure] = ()
) -> GenerationRequest:
    """The request with the time that is left of its deadline and its objective. One that a server had accepted has no
    objective any more, for which others might refuse it. Raises HeadraceError (504) if the deadline has passed."""
    deadline, objective = request.terms.deadline_s, request.terms.slo_ttft_s
    if deadline is not None:
        deadline -= elapsed_s
        if deadline <= 0:
            raise HeadraceError(_deadline_error(request))
    if objective is not None:
        objective -= elapsed_s
        if objective <= 0 or not all(failure.reason in REFUSALS for failure in failures):
            objective = None
    terms = msgspec.structs.replace(request.terms, deadline_s=deadline, slo_ttft_s=objective)
    return msgspec.structs.replace(request, terms=terms)


def _deadline_error(request: GenerationRequest) -> ErrorInfo:
    text = f"not done within the deadline of {request.terms.deadline_s:g} s"
    return ErrorInfo(code=DEADLINE, message=text, status=504)
