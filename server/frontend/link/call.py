"""A call: one request at the scheduler, from its submission to its end."""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from headrace.core.messages.frontend import Abort, AnyFrontendRequest, Submit
from headrace.core.messages.replies import (
    Held,
    HiddenPart,
    LogprobPart,
    PrefillDecided,
    Progress,
    Promised,
    RequestFailed,
    RequestFinished,
    Reserved,
    Tokens,
)
from headrace.core.types.errors import CANCELLED, ErrorInfo, HeadraceError
from headrace.core.types.requests.remote_prefill import PrefillDecision
from headrace.core.types.requests.request import FetchFrom

CLIENT_DISCONNECTED = ErrorInfo(code=CANCELLED, message="the client disconnected", status=499)
CallEvent = Progress | Promised | Tokens | HiddenPart | LogprobPart | PrefillDecided | Reserved | Held | RequestFinished


class CallTable(Protocol):
    """Where a call sends its messages, and gets its replies from."""

    def register(self, call: "Call") -> None:
        """Route replies to this call. Raises HeadraceError if its rid is in use, or the scheduler cannot answer."""
        ...

    def unregister(self, call: "Call") -> None:
        """Stop routing replies to this call."""
        ...

    def post(self, message: AnyFrontendRequest) -> None:
        """Send a message to the scheduler."""
        ...


class Call:
    """One request, submitted on entering the async context. Leaving it aborts the request unless it has ended."""

    def __init__(self, client: CallTable, submit: Submit) -> None:
        self._client = client
        self._submit = submit
        self._events: asyncio.Queue[CallEvent | RequestFailed] = asyncio.Queue()  # bounded by the request's max_tokens
        self._open = False  # from the submission until the context is left; then the rid may be another call's
        self._lost: ErrorInfo | None = None
        self.rid = submit.rid
        self.tenant = submit.terms.tenant
        self.piece = submit.open
        """It is a piece of an open prompt, and no request of a client that waits."""
        self.ended = False
        """RequestFinished or RequestFailed has come: the scheduler knows nothing of the request any more."""
        self.decision: PrefillDecision | None = None
        """Where the prompt is computed, if that was compared."""
        self.kept = False
        """The scheduler holds the request beyond the context."""

    async def __aenter__(self) -> Self:
        self._client.register(self)
        self._open = True
        self._client.post(self._submit)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        self._client.unregister(self)
        if not self.ended and not self.kept:
            self._client.post(Abort(rid=self.rid, error=self._lost or CLIENT_DISCONNECTED))

    async def next(self) -> CallEvent:
        """The next event of the request; RequestFinished is the last. Raises HeadraceError if the request failed."""
        event = await self._events.get()
        if isinstance(event, RequestFailed):
            raise HeadraceError(event.error)
        return event

    def deliver(self, event: CallEvent | RequestFailed) -> None:
        """Queue an event for next()."""
        if isinstance(event, PrefillDecided):
            self.decision = event.decision
        self.ended = self.ended or isinstance(event, RequestFinished | RequestFailed)
        self._events.put_nowait(event)

    def lose(self, error: ErrorInfo) -> None:
        """Have next() raise this error without an answer of the scheduler. It may still compute the request: leaving
        the context aborts it, and the rid stays in use until the scheduler has reported its end."""
        if not self.ended and self._lost is None:
            self._lost = error
            self._events.put_nowait(RequestFailed(rid=self.rid, error=error))

    def abort(self, error: ErrorInfo) -> None:
        """Abort the request; next() raises this error unless the request ends otherwise before. No effect after the
        context has been left."""
        if self._open:
            self._client.post(Abort(rid=self.rid, error=error))

    async def end(self, error: ErrorInfo) -> None:
        """Abort the request and wait until the scheduler knows nothing of it any more: its rid is free then."""
        self.abort(error)
        with contextlib.suppress(HeadraceError):
            while not self.ended:
                await self.next()

    def keep(self) -> None:
        """Do not abort the request on leaving the context: the scheduler holds its KV. It can still be cancelled."""
        self.kept = True

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the scheduler ends the request by itself after the last of these tokens."""
        return tokens[-1] in self._submit.sampling.stop_token_ids

    @property
    def fetches(self) -> bool:
        """Its first token comes from a prefill server."""
        return isinstance(self._submit.route, FetchFrom) and (self.decision is None or self.decision.remote)

    def finish(self) -> None:
        """End the request as complete; next() returns RequestFinished."""
        if self._open:
            self._client.post(Abort(rid=self.rid, finish=True))
