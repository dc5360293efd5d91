"""HTTP client of one decode engine: prompts as token ids, a first token, metrics. What it sends is bounded in size."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ErrorInfo, HeadraceError, shown
from headrace.integrations.http_client import failure
from headrace.server.http.ranges import TokenId
from headrace.server.upstream.bounded_response import PLAIN, read_bounded

T = TypeVar("T")
TIMEOUT_S = 30.0  # of an answer that takes no computation on the engine's device
METRICS_TIMEOUT_S = 2.0
MAX_BYTES = 64 << 20
LARGE_BYTES = 1 << 16  # of an answer that a thread decodes, and not the event loop
DECODE_UNREACHABLE = "decode_unreachable"
DECODE_FAILED = "decode_failed"


class _Tokenized(msgspec.Struct):
    tokens: list[TokenId]


class _Error(msgspec.Struct):
    message: str = "no message"
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


class EngineClient:
    """Calls to the decode engine at this URL. http: sends the API key of decode engines, if they have one."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self.url = url

    async def tokenize(self, body: Mapping[str, object]) -> list[int]:
        """Token ids of a text or a conversation, as the engine would compute it. Raises HeadraceError: the engine's own
        refusal of the body, or 502."""
        answer = await self._post("/tokenize", msgspec.json.encode(body))
        return (await self._decoded("/tokenize", answer, _Tokenized)).tokens

    async def complete(self, body: dict[str, Any]) -> bytes:
        """POST /v1/completions. Raises HeadraceError."""
        return await self._post("/v1/completions", msgspec.json.encode(body))

    async def metrics(self) -> str:
        """GET /metrics; "" if it does not answer in time."""
        try:
            return (await self._send("GET", "/metrics", None, METRICS_TIMEOUT_S))[1].decode(errors="replace")
        except HeadraceError:
            return ""

    async def _post(self, path: str, body: bytes) -> bytes:
        status, content = await self._send("POST", path, body, TIMEOUT_S)
        if status == 200:
            return content
        if status in (401, 403):
            text = f"decode engine {self.url} answers {status} to POST {path}: it wants another key (--decode-api-key)"
            raise HeadraceError(ErrorInfo(code=DECODE_FAILED, message=text, status=502))
        if status in (404, 405) and b'"Not Found"' in content:
            text = f"decode engine {self.url} has no POST {path}, which prompts become token ids by"
            raise HeadraceError(ErrorInfo(code=DECODE_FAILED, message=text, status=502))
        try:
            error = msgspec.json.decode(content, type=_ErrorBody).error
        except NO_MESSAGE:
            error = _Error(shown(content.decode(errors="replace"), 200))
        if 400 <= status < 500:
            raise HeadraceError(
                ErrorInfo(code="invalid_value", message=error.message, status=status, field=error.param)
            )
        text = f"decode engine {self.url} answers {status} to POST {path}: {shown(error.message, 300)}"
        raise HeadraceError(ErrorInfo(code=DECODE_FAILED, message=text, status=502))

    async def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and content. Raises HeadraceError (502) if there is no answer, or a larger one than is taken."""
        headers = {**PLAIN, "Content-Type": "application/json"} if body is not None else PLAIN
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, f"{self.url}{path}", content=body, headers=headers) as response,
            ):
                return response.status_code, await read_bounded(response, MAX_BYTES)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            text = f"decode engine {self.url}: {method} {path}: {failure(error)}"
            raise HeadraceError(ErrorInfo(code=DECODE_UNREACHABLE, message=text, status=502)) from error

    async def _decoded(self, path: str, content: bytes, kind: type[T]) -> T:
        try:
            if len(content) < LARGE_BYTES:
                return msgspec.json.decode(content, type=kind)
            return await asyncio.to_thread(msgspec.json.decode, content, type=kind)
        except NO_MESSAGE as error:
            text = f"decode engine {self.url}: POST {path} sent an unexpected answer: {error}"
            raise HeadraceError(ErrorInfo(code=DECODE_FAILED, message=text, status=502)) from error
