"""Routes of a gateway for SGLang: what SGLang's routers ask a prefill server for, and operations."""

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.runtime.process import max_http_connections
from headrace.core.types.errors import HeadraceError, invalid
from headrace.core.types.request import Timing, Usage
from headrace.server.api.request.body import read_body
from headrace.server.api.request.body_budget import BodyBudget
from headrace.server.api.response.error_response import error_response, install_handlers
from headrace.server.api.response.middleware import ApiKeys, RequestMetrics
from headrace.server.api.response.streaming import ClientDisconnected, json_response, until_disconnect
from headrace.server.frontend.request.generation_request import GenerationResult
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.gateway.handoff import SAMPLING
from headrace.server.gateway.metrics import GATEWAY_CATALOG
from headrace.server.gateway.sglang.bodies import SglangBody, take_apart
from headrace.server.gateway.sglang.gateway import SglangGateway, refusal
from headrace.server.telemetry.exposition import CONTENT_TYPE, render
from headrace.server.version import headrace_version

PROMPTS = ("/generate", "/v1/completions", "/v1/chat/completions")
QUESTIONS = (
    *("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load"),
    "/health_generate",
)
"""Asked by routers, and answered by a prefill server."""
PASSED_ON = ("x-request-id", "traceparent", "tracestate")


def create_sglang_app(gateway: SglangGateway) -> FastAPI:
    """All routes. The caller starts and stops the gateway."""
    app = FastAPI(title="Headrace gateway for SGLang", docs_url=None, redoc_url=None, openapi_url=None)
    install_handlers(app)
    config = gateway.config
    budget = BodyBudget(config.max_body_bytes)
    gateway.front_metrics.include(budget.statistics)
    app.include_router(_prompt_routes(gateway, budget))
    app.include_router(_operation_routes(gateway))
    app.add_middleware(ApiKeys, keys=config.api_keys, tenants={}, max_open=max_http_connections() // 2)
    app.add_middleware(RequestMetrics, metrics=gateway.front_metrics, clock=gateway.clock, recent=gateway.recent)
    return app


def _prompt_routes(gateway: SglangGateway, budget: BodyBudget) -> APIRouter:
    router = APIRouter()

    async def hand_over(http: Request) -> Response:
        raw = await read_body(http, gateway.config.max_body_bytes, budget)
        try:
            fields = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise invalid("body", f"the body is no JSON: {error}") from error
        return RoomResponse(gateway, take_apart(fields))

    async def question(http: Request) -> Response:
        status, content = await gateway.get(http.url.path)
        return Response(content, status, media_type="application/json")

    for path in PROMPTS:
        router.add_api_route(path, hand_over, methods=["POST"])
    for path in QUESTIONS:
        router.add_api_route(path, question, methods=["GET"])
    return router


def _operation_routes(gateway: SglangGateway) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while this process works."""
        problem = gateway.unhealthy()
        return json_response({"status": "ok"}) if problem is None else error_response(problem)

    @router.get("/ready")
    async def ready() -> Response:
        """200 if a prompt sent now would be handed over."""
        problem = gateway.not_ready()
        return json_response({"status": "ready"}) if problem is None else error_response(problem)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(render(gateway.statistics(), GATEWAY_CATALOG), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": headrace_version()})

    return router


class RoomResponse(Response):
    """The answer to a router's request, once the decode engine has the KV. A client that disconnects gives it up."""

    def __init__(self, gateway: SglangGateway, body: SglangBody) -> None:
        super().__init__()
        self._gateway = gateway
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the prompt over and answer."""
        with self._gateway.counted():
            try:
                response = await until_disconnect(receive, self._answer(scope))
            except ClientDisconnected:
                return
            await response(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        record: RequestRecord = scope["state"]["record"]
        request_id = record.context.request_id
        record.began(request_id, SAMPLING)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        headers = {name: given[name] for name in PASSED_ON if name in given}
        headers |= {"x-request-id": request_id, "content-type": "application/json"}
        try:
            answer = await self._gateway.hand_over(scope["path"], self._body, headers)
        except HeadraceError as error:
            record.failed(error.info)
            return error_response(error.info)
        if answer.status >= 400:
            record.failed(refusal(answer))
            return Response(answer.content, answer.status, media_type="application/json")
        record.ended(GenerationResult(finish_reason=None, usage=Usage(0, 0, 0), timing=Timing(), kv="handed_over"))
        return Response(answer.content, answer.status, media_type="application/json")
