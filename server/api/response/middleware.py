"""What happens around every route: the key is checked, the answer is counted, the client's request id goes back."""

import hmac
from collections.abc import Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.response.errors import error_response
from headrace.server.telemetry.metrics import FrontMetrics

OPEN_PATHS = ("/health", "/ready", "/metrics", "/query")
CLIENT_GONE = 499


class ApiKeys:
    """Refuses requests without one of the keys as a bearer token. Without keys it lets everything through."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS or self._shown(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is required: send the header 'Authorization: Bearer KEY'"
        await error_response(ErrorInfo(code="invalid_api_key", message=message, status=401))(scope, receive, send)

    def _shown(self, scope: Scope) -> bool:
        scheme, _, shown = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(shown.strip(), key) for key in self._keys]  # all, in constant time
        return scheme.lower() == b"bearer" and any(matches)


class Accounts:
    """Counts answers by route and status, and gives the client's X-Request-Id back."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics, clock: Clock) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock.now()
        status = CLIENT_GONE
        request_id = dict(scope["headers"]).get(b"x-request-id")

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if request_id is not None:
                    message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._metrics.answered(_template(scope.get("route")), status, self._clock.now() - started)


def _template(route: BaseRoute | None) -> str:
    """The path as the route declares it; "other" for paths that no route knows."""
    return str(route.path) if route is not None and hasattr(route, "path") else "other"
