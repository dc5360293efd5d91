"""Error responses in OpenAI's form, with the status, code and field of an ErrorInfo."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.http.body import ACCEPTED
from headrace.server.http.streaming import EventWriter, json_response

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled_error",
}
_MORE: Any = msgspec.UNSET  # default of a field that is there only if it applies
_CODES = {404: "not_found", 405: "method_not_allowed"}


class Error(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    """One sentence for people."""
    type: str
    param: str | None
    """The field at fault."""
    code: str
    """Stable; programs may match on it."""
    stage: int = _MORE
    """The pipeline stage that failed."""
    status: int = _MORE
    """In events, since the head of their response was sent before."""


class ErrorReply(msgspec.Struct):
    """Body of every response that is no success."""

    error: Error


def error_body(info: ErrorInfo) -> ErrorReply:
    """The JSON object of an error."""
    kind = _TYPES.get(info.status, "server_error" if info.status >= 500 else "invalid_request_error")
    stage = _MORE if info.stage is None else info.stage
    return ErrorReply(Error(info.message, kind, info.field, info.code, stage))


def error_response(info: ErrorInfo) -> Response:
    """An error as a whole HTTP response."""
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(info.retry_after_s)))
    if info.status == 415:
        headers["Accept-Encoding"] = ACCEPTED
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(info), status=info.status, headers=headers)


async def write_error_event(events: EventWriter, info: ErrorInfo) -> None:
    """End a stream that failed after its first event. The error has the status that its response would have had."""
    body = error_body(info)
    body.error.status = info.status
    await events.data(body)
    await events.done()


def install_handlers(app: FastAPI, allowed: Callable[[Scope], str]) -> None:
    """Answer every failure of a route in the same form. allowed: the methods of a path."""

    @app.exception_handler(HeadraceError)
    async def headrace_error(request: Request, error: HeadraceError) -> Response:
        record: RequestRecord | None = request.scope.get("state", {}).get("record")
        if record is not None:
            record.answered(error.info)
        return error_response(error.info)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Unknown paths and methods. OPTIONS is answered with the methods, and with no word for pages of other
        origins (CORS), which therefore cannot use the API."""
        if error.status_code == 405 or request.scope["path"] == "*":
            headers = {"Allow": allowed(request.scope)}
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
            error = HTTPException(error.status_code, error.detail, headers)
        code = _CODES.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(ErrorInfo(code=code, message=message, status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(_request: Request, _error: Exception) -> Response:
        """Starlette logs the traceback; the client gets a plain 500."""
        return error_response(ErrorInfo(code="internal_error", message="internal error; see the log", status=500))
