"""POST /v1/prefill to a prefill server: its progress events, its response or its error."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Literal, Protocol, Self, TypeVar

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, PREFILL_PATH, PrefillRequest
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import (
    CANCELLED,
    GRAMMAR_REJECTED,
    MODEL_NOT_FOUND,
    NONFINITE,
    PREFILL_FAILED,
    PREFILL_LOST,
    ErrorInfo,
    HeadraceError,
)
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.resume import Resume
from headrace.integrations.http_client import connection_error
from headrace.server.routing.failover import client_error
from headrace.server.upstream.connection import Extensions, past_stale_connection
from headrace.text.logprobs import LogprobEntry

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]

RESPONSE_TIMEOUT_S = 1.0  # the response follows the last byte of the KV within milliseconds
LARGE_TIMEOUT_S = 30.0  # with logprobs or hidden states of a long prompt it is many megabytes
LARGE_BYTES = 1 << 16  # of a response that a thread decodes, and not the event loop
CLIENT_STATUSES = (400, 413, 422, 429, 499, 503, 504)  # mean the same to our client
_SECONDS = re.compile(r"[0-9]{1,5}")


class PrefillProgress(msgspec.Struct, frozen=True):
    """How far the prefill server is."""

    phase: str
    """bootstrapped, computing or transferring."""
    done: int = 0
    """Prompt tokens computed."""
    total: int = 0
    """Prompt tokens in all."""


class HiddenField(msgspec.Struct, frozen=True):
    """Hidden states in a prefill server's response."""

    start: Natural
    shape: tuple[Natural, Positive]
    dtype: Literal["float32", "bfloat16", "float16"]
    data: bytes
    """In base64."""

    def states(self) -> HiddenStates | None:
        """What was sent; None if it is not of its own shape."""
        states = HiddenStates(self.start, self.shape[1], self.dtype, self.data)
        return states if len(self.data) == self.shape[0] * states.state_bytes else None


class PrefillResponse(msgspec.Struct, frozen=True):
    """Fields of a prefill server's response that a decode server uses."""

    timing_ms: dict[str, float] = {}
    """Milliseconds by phase."""
    prompt_logprobs: list[LogprobEntry | None] | None = None
    hidden_states: HiddenField | None = None

    @property
    def own_s(self) -> float | None:
        """Seconds for which the prefill server has had the prompt queued and computed it; None if it does not say."""
        queue, forward = self.timing_ms.get("queue"), self.timing_ms.get("forward")
        return None if queue is None or forward is None else (queue + forward) / 1000


class CallObserver(Protocol):
    """Sees one call to a prefill server, for a trace."""

    def headers(self) -> dict[str, str]:
        """Ids of the request, and of the span whose child the prefill server's is."""
        ...

    def began(self) -> None:
        """The prompt is sent."""
        ...

    def ended(self, error: str) -> None:
        """The call is over. error: code of what it failed with, "cancelled" if it was given up, "" if it went well."""
        ...


class PrefillCall:
    """One prompt sent to a prefill server, as an async context.

    The prompt is sent by start(). Leaving the context with an exception closes the connection, which cancels the prompt
    there. posted: called when the prompt is sent. answered: called when the response or an error has come; not if the
    context is left before. running: set that keeps the task while it runs.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        body: PrefillRequest,
        observer: CallObserver,
        *,
        posted: Callable[[], None],
        answered: Callable[[], None],
        running: "set[asyncio.Task[None]]",
    ) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._observer = observer
        self._posted = posted
        self._answered = answered
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._response: PrefillResponse | None = None
        self._error: ErrorInfo | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None and kind is not None:
            self._task.cancel()

    def start(
        self,
        on_progress: Callable[[PrefillProgress], None],
        on_error: Callable[[ErrorInfo], None],
        resume: Resume | None = None,
    ) -> None:
        """Send the prompt. on_error is called once if the prefill server refuses or fails it. resume: field of the
        body."""
        self._body = msgspec.structs.replace(self._body, resume=resume)
        self._posted()
        self._observer.began()
        self._task = asyncio.create_task(self._run(on_progress, on_error))
        self._running.add(self._task)
        self._task.add_done_callback(self._running.discard)

    async def response(self) -> PrefillResponse | None:
        """The prefill server's response; None if it does not follow the KV in time. Raises HeadraceError (502) if it
        does not, and has logprobs or hidden states of the prompt."""
        wanted = "hidden states" if self._body.hidden_states is not None else ""
        wanted = "logprobs" if self._body.prompt_logprobs is not None else wanted
        await self._settle(LARGE_TIMEOUT_S if wanted else RESPONSE_TIMEOUT_S)
        if wanted and self._response is None:
            message = f"prefill server {self._url} has not sent the {wanted} of the prompt"
            raise HeadraceError(self._error or ErrorInfo(code=PREFILL_LOST, message=message, status=502))
        return self._response

    async def cause(self, error: ErrorInfo) -> ErrorInfo:
        """Why the request failed. A prefill server whose HTTP connection breaks takes that for a client who leaves, and
        the peers of the ticket may learn of it first."""
        return await self.refusal(error) if error.at_prefill and error.code == CANCELLED else error

    async def refusal(self, error: ErrorInfo) -> ErrorInfo:
        """What the prefill server has answered to the prompt, which has a status; `error`, by which its ticket has
        failed, if no answer comes in time."""
        await self._settle()
        return self._error or error

    async def _settle(self, timeout_s: float = RESPONSE_TIMEOUT_S) -> None:
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), timeout_s)

    async def _run(self, on_progress: Callable[[PrefillProgress], None], on_error: Callable[[ErrorInfo], None]) -> None:
        outcome = CANCELLED
        try:
            self._response = await self._post(on_progress)
            outcome = ""
        except HeadraceError as error:
            outcome = error.info.code
            self._error = msgspec.structs.replace(error.info, at_prefill=True)
            log.debug("prefill server %s: %s", self._url, self._error.message)
            self._answered()
            on_error(self._error)
        else:
            self._answered()
        finally:
            self._observer.ended(outcome)
            self._task = None  # its exception has this frame

    async def _post(self, on_progress: Callable[[PrefillProgress], None]) -> PrefillResponse:
        """Raises HeadraceError with the status for our client."""
        try:
            return await past_stale_connection(lambda extensions: self._send(on_progress, extensions))
        except httpx.HTTPError as error:
            raise HeadraceError(connection_error(self._url, error)) from error

    async def _send(self, on_progress: Callable[[PrefillProgress], None], extensions: Extensions) -> PrefillResponse:
        """Raises HeadraceError for an error response, httpx.HTTPError."""
        url, headers, content = self._url + PREFILL_PATH, self._observer.headers() | JSON_HEADERS, self._body.encoded()
        async with self._http.stream("POST", url, content=content, headers=headers, extensions=extensions) as response:
            if response.status_code != 200:
                raise HeadraceError(response_error(response.status_code, await response.aread(), response.headers))
            if not self._body.stream:
                return await _decode_response(await response.aread())
            return await _read_events(response, on_progress)


async def _read_events(response: httpx.Response, on_progress: Callable[[PrefillProgress], None]) -> PrefillResponse:
    """Read the server-sent events of a prefill until its response. Raises HeadraceError."""
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ").encode()
            if event == "done":
                return await _decode_response(data)
            if event == "error":
                status = _decode(data, _ErrorResponse).error.status or 502
                raise HeadraceError(response_error(status, data, response.headers))
            progress = _decode(data, _ProgressData)
            phase = "computing" if event == "progress" else event
            on_progress(PrefillProgress(phase, progress.done, progress.total))
    message = "the prefill server closed its event stream before the response"
    raise HeadraceError(ErrorInfo(code=PREFILL_LOST, message=message, status=502))


class _ProgressData(msgspec.Struct):
    done: int = 0
    total: int = 0


class _ErrorBody(msgspec.Struct):
    message: str = "no message"
    code: str | None = None
    param: str | None = None
    status: int = 0


class _ErrorResponse(msgspec.Struct):
    error: _ErrorBody = msgspec.field(default_factory=_ErrorBody)


def response_error(status: int, content: bytes, headers: "httpx.Headers") -> ErrorInfo:
    """The error for our client after a prefill server's error response. Errors of the request, overload,
    nonfinite results and adapters that it lacks keep their status; those between the two servers (keys, tickets,
    routes, crashes) become 502."""
    error = stated_error(status, content, headers)
    if status not in CLIENT_STATUSES and error.code not in (NONFINITE, GRAMMAR_REJECTED):
        message = f"the prefill server answered {status}: {error.message}"
        if error.code == MODEL_NOT_FOUND:
            return msgspec.structs.replace(error, message=message)
        return ErrorInfo(code=PREFILL_FAILED, message=message, status=502)
    return error


def stated_error(status: int, content: bytes, headers: "httpx.Headers") -> ErrorInfo:
    """What a prefill server's error response says, as it is."""
    try:
        error = msgspec.json.decode(content, type=_ErrorResponse).error
    except NO_MESSAGE:
        error = _ErrorBody(message=content[:200].decode(errors="replace"))
    retry_after = headers.get("Retry-After", "")
    return ErrorInfo(
        code=error.code or PREFILL_FAILED,
        message=error.message,
        status=status,
        field=error.param,
        retry_after_s=float(retry_after) if _SECONDS.fullmatch(retry_after) else None,
    )


def posted_error(error: ErrorInfo) -> ErrorInfo:
    """The error for a client whose prompt a router has sent to the prefill server. Errors of the prompt,
    overload and another adapter keep their status; those between the two servers (tickets, sessions, a cancelled
    prefill) become 502 or 504."""
    told = client_error(error)
    if told.code == MODEL_NOT_FOUND or (told.status in CLIENT_STATUSES and told.code != CANCELLED):
        return told
    return msgspec.structs.replace(told, status=told.status if told.status >= 500 else 502)


async def _decode_response(data: bytes) -> PrefillResponse:
    """Raises HeadraceError for what is none."""
    if len(data) < LARGE_BYTES:
        return _decode(data, PrefillResponse)
    return await asyncio.to_thread(_decode, data, PrefillResponse)


def _decode(data: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except NO_MESSAGE as error:
        message = f"the prefill server sent an unexpected response: {error}"
        raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502)) from error
