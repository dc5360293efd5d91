"""The HTTP half of a ticket: a prompt posted to a prefill server, its progress, its answer or its error."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import CANCELLED, ErrorInfo, HeadraceError
from headrace.server.tokenizer.logprobs import LogprobEntry

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)

LINGER_S = 1.0  # the answer follows the last byte of the KV within milliseconds
PASSED_ON = (400, 413, 422, 429, 499, 503, 504)  # statuses that mean the same to our client
PREFILL_FAILED = "prefill_failed"
_SECONDS = re.compile(r"[0-9]{1,5}")


class FetchProgress(msgspec.Struct, frozen=True):
    """How far the prefill server is. phase: bootstrapped, computing, transferring."""

    phase: str
    done: int = 0
    total: int = 0


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What a decode server needs of a prefill's response. Times in milliseconds."""

    timing_ms: dict[str, float] = {}
    prompt_logprobs: list[LogprobEntry | None] | None = None


class PrefillCall:
    """Starts with start(); leaving the context before the answer closes the connection, which cancels the prompt
    at the prefill server. load is called with +1 at the start, and with -1 when the answer is there or the context
    is left."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        body: dict[str, Any],
        load: Callable[[int], None],
        running: "set[asyncio.Task[None]]",
    ) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._load = load
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._answer: PrefillAnswer | None = None
        self._loading = False

    async def __aenter__(self) -> Self:
        self._loading = True
        self._load(+1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unload()
        if self._task is not None and kind is not None:
            self._task.cancel()

    def start(self, on_progress: Callable[[FetchProgress], None], on_error: Callable[[ErrorInfo], None]) -> None:
        """Post the prompt. on_error is called once when the prefill server refuses or fails it."""
        self._task = asyncio.create_task(self._run(on_progress, on_error))
        self._running.add(self._task)
        self._task.add_done_callback(self._running.discard)

    async def answer(self) -> PrefillAnswer | None:
        """The prefill server's answer; None when it does not come although the KV has come."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), LINGER_S)
        return self._answer

    async def _run(self, on_progress: Callable[[FetchProgress], None], on_error: Callable[[ErrorInfo], None]) -> None:
        try:
            self._answer = await self._post(on_progress)
        except HeadraceError as error:
            log.info("prefill server %s: %s", self._url, error.info.message)
            on_error(error.info)
        finally:
            self._unload()

    def _unload(self) -> None:
        if self._loading:
            self._loading = False
            self._load(-1)

    async def _post(self, on_progress: Callable[[FetchProgress], None]) -> PrefillAnswer:
        """Raises HeadraceError with the status for our client."""
        try:
            async with self._http.stream("POST", f"{self._url}/v1/prefill", json=self._body) as response:
                if response.status_code != 200:
                    raise HeadraceError(refusal(response.status_code, await response.aread(), response.headers))
                if not self._body.get("stream"):
                    return _decode(await response.aread(), PrefillAnswer)
                return await _follow(response, on_progress)
        except httpx.HTTPError as error:
            message = f"prefill server {self._url}: {type(error).__name__} {error}".rstrip()
            raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502)) from error


async def _follow(response: httpx.Response, on_progress: Callable[[FetchProgress], None]) -> PrefillAnswer:
    """Read the event stream of a prefill to its end."""
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ").encode()
            if event == "done":
                return _decode(data, PrefillAnswer)
            if event == "error":
                raise HeadraceError(refusal(_decode(data, _Refusal).error.status or 502, data, response.headers))
            progress = _decode(data, _ProgressData)
            phase = "computing" if event == "progress" else event
            on_progress(FetchProgress(phase, progress.done, progress.total))
    raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message="the prefill server ended its answer early", status=502))


class _ProgressData(msgspec.Struct):
    done: int = 0
    total: int = 0


class _ErrorBody(msgspec.Struct):
    message: str = "no message"
    code: str | None = None
    param: str | None = None
    status: int = 0


class _Refusal(msgspec.Struct):
    error: _ErrorBody = msgspec.field(default_factory=_ErrorBody)


def refusal(status: int, content: bytes, headers: "httpx.Headers") -> ErrorInfo:
    """What a prefill server's error answer means for our client: its own request errors and overload pass through;
    whatever is between the two servers (keys, tickets, routes, crashes) is a 502."""
    try:
        error = msgspec.json.decode(content, type=_Refusal).error
    except NO_MESSAGE:
        error = _ErrorBody(message=content[:200].decode(errors="replace"))
    if status not in PASSED_ON:
        message = f"the prefill server answered {status}: {error.message}"
        return ErrorInfo(code=PREFILL_FAILED, message=message, status=502)
    retry_after = headers.get("Retry-After", "")
    return ErrorInfo(
        code=error.code or PREFILL_FAILED,
        message=error.message,
        status=status,
        field=error.param,
        retry_after_s=float(retry_after) if _SECONDS.fullmatch(retry_after) else None,
    )


def passed_on(info: ErrorInfo) -> ErrorInfo:
    """What a failure means for a client whose prompt somebody else has posted: refusals of the prompt and overload are
    the same to it; what went wrong between the two servers (tickets, sessions, a cancelled prefill) is a 502."""
    if info.status in PASSED_ON and info.code != CANCELLED:
        return info
    return msgspec.structs.replace(info, status=info.status if info.status >= 500 else 502)


def _decode(data: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except NO_MESSAGE as error:
        message = f"the prefill server answered something else: {error}"
        raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502)) from error
