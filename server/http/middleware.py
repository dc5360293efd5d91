"""Middleware around every route: API keys, request metrics and log, X-Request-Id."""

import hmac
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.runtime.clock import Clock
from headrace.core.shares import Shares
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.request.request_context import REQUEST_ID_HEADER, TraceSampler, read_context
from headrace.server.frontend.request_log import RequestLog, RequestRecord
from headrace.server.frontend.status.recent_events import RecentEvents
from headrace.server.http.audience import Audience, Audiences
from headrace.server.http.error_response import error_response
from headrace.server.telemetry.label_values import PROMPT_ROUTES, UNKNOWN_ROUTE
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.spans import RecordSpan

TTFT_BOUND_HEADER = "x-headrace-ttft-bound"  # seconds
FOR_OPERATORS = "for_operators"  # 403
MOST_AROUND = 256  # prompts whose time outside the scheduler is kept
CLIENT_DISCONNECTED = 499  # counted as the status if no response was started


class ApiKeys:
    """Refuses requests without one of the keys as a bearer token (401), and those of tenants to routes that are for
    operators (403). Passes everything if there are no keys.

    The name of the tenant whose key it is goes into the state of the request. Once as many requests are open as may be,
    those of a tenant with an equal share of them are refused (429), so that connections are left for the others.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        tenants: Mapping[str, str],
        max_open: int,
        audiences: Audiences,
    ) -> None:
        """tenants: more keys, by the name of the tenant. max_open: requests with a key that may be open at a time.
        audiences: of the routes of app."""
        self._app = app
        self._audiences = audiences
        self._max_open = max_open
        self._open = Shares()  # requests, by tenant
        self._keys = [("", key.encode()) for key in keys] + [(name, key.encode()) for name, key in tenants.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401, 403 or 429."""
        audience: Audience = "everyone"
        if scope["type"] == "http" and self._keys:
            audience = self._audiences.of(scope)
        if audience == "everyone":
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant and audience == "operators":
            message = "this needs a key of --api-key: the answer is about requests of all tenants"
            error = ErrorInfo(code=FOR_OPERATORS, message=message, status=403)
        elif tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            if self._open.admits(tenant, 1, self._max_open):
                await self._counted(tenant, scope, receive, send)
                return
            error = refusals.OPEN_BY_KEY.error(own=self._open.used(tenant), total=self._open.total)
        else:
            message = "a valid API key is required: send the header 'Authorization: Bearer KEY'"
            error = ErrorInfo(code="invalid_api_key", message=message, status=401)
        record: RequestRecord | None = scope.get("state", {}).get("record")
        if record is not None:
            record.answered(error)
        await error_response(error)(scope, receive, send)

    async def _counted(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._open.add(tenant, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._open.add(tenant, -1)

    def _tenant(self, scope: Scope) -> str | None:
        """The tenant whose key the request has, "" for a key without a name; None for no key."""
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        matches = [name for name, key in self._keys if hmac.compare_digest(token.strip(), key)]  # all, in constant time
        return matches[0] if matches and scheme.lower() == b"bearer" else None


class RequestMetrics:
    """Counts responses by route and status, logs requests with prompts, and says in X-Request-Id which id they have in
    the logs: the client's, or one that is made up. sampler, record_span: of those whose spans are recorded."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: FrontMetrics,
        clock: Clock,
        recent: RecentEvents,
        sampler: TraceSampler | None = None,
        record_span: RecordSpan = lambda _span: None,
        promise: float = 0.0,
    ) -> None:
        """promise: share of the promised times to first token that are to be kept; 0: none are promised."""
        self._app = app
        self._promise = promise
        self._around: deque[float] = deque(maxlen=MOST_AROUND)
        self._metrics = metrics
        self._clock = clock
        self._sampler = sampler
        self._record_span = record_span
        self._log = RequestLog(clock.now(), recent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and observe its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock.now()
        status = CLIENT_DISCONNECTED
        context = read_context(scope["headers"])
        logged = scope["method"] == "POST"  # not the probes of orchestrators, which are refused until a server is ready
        if self._sampler is not None and logged:
            context = self._sampler.sample(context)
        record = RequestRecord(context, self._clock.now)
        scope.setdefault("state", {})["record"] = record
        request_id = (REQUEST_ID_HEADER.encode(), record.context.request_id.encode())

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), request_id, *self._bound(record)]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route, now = _template(scope.get("route")), self._clock.now()
            self._metrics.observe_request(route, status, now - started)
            asked = scope["path"] if scope["path"] in PROMPT_ROUTES else route  # one that is refused has no route
            if logged and asked in PROMPT_ROUTES:
                self._metrics.count_ends(asked, record.ends(status))
            if logged:
                self._log.write(record, route, status, now - started, now)
            if context.recorded:
                self._record_span(record.span(route, status, started, now))
            if (around_s := record.around_s) is not None:
                self._around.append(around_s)

    def _bound(self, record: RequestRecord) -> Iterator[tuple[bytes, bytes]]:
        """The header of an answer whose first token was promised: the scheduler's bound, and what prompts have taken
        outside the scheduler lately, in as many cases as are to be kept."""
        if record.ttft_bound_s is not None:
            around = sorted(self._around)
            outside_s = around[min(len(around) - 1, int(self._promise * len(around)))] if around else 0.0
            yield TTFT_BOUND_HEADER.encode(), b"%.6f" % (record.ttft_bound_s + outside_s)


def _template(route: BaseRoute | None) -> str:
    """The path as the route declares it, with the names of its parameters."""
    return route.path_format if isinstance(route, Route) else UNKNOWN_ROUTE
