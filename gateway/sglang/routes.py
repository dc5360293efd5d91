"""Routes of a gateway for SGLang: what SGLang's routers ask a prefill server for, and operations."""

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.types.errors import HeadraceError
from headrace.core.types.requests.request import SamplingParams, Timing, Usage
from headrace.gateway.operations import gateway_app, one_model
from headrace.gateway.sglang.bodies import SglangBody, rooms_of, take_apart
from headrace.gateway.sglang.gateway import SglangGateway
from headrace.server.api.request.parse import decode_object
from headrace.server.frontend.request.generation_request import GenerationResult
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.error_response import error_response
from headrace.server.http.streaming import ClientDisconnected, json_response, until_disconnect

PROMPTS = ("/generate", "/v1/completions", "/v1/chat/completions")
MODELS = "/v1/models"
QUESTIONS = (
    *(MODELS, "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load"),
    "/health_generate",
)
"""Asked by routers, and answered by a prefill server."""
PASSED_ON = ("x-request-id", "traceparent", "tracestate")


def create_sglang_app(gateway: SglangGateway) -> FastAPI:
    """All routes. The caller starts and stops the gateway."""
    return gateway_app("Headrace gateway for SGLang", gateway, lambda budget: _prompt_routes(gateway, budget))


def _prompt_routes(gateway: SglangGateway, budget: BodyBudget) -> APIRouter:
    router = APIRouter()

    async def hand_over(http: Request) -> Response:
        raw = await read_body(http, gateway.config.max_body_bytes, budget)
        fields = await decode_object(raw)
        try:
            return RoomResponse(gateway, take_apart(fields, gateway.served_names))
        except HeadraceError as error:
            gateway.refuse(rooms_of(fields), error.info)
            raise

    async def question(http: Request) -> Response:
        status, content = await gateway.get(http.url.path)
        return Response(content, status, media_type="application/json")

    async def model(name: str) -> Response:
        """Out of the list: what a client writes into a path is not passed on."""
        status, content = await gateway.get(MODELS)
        if status != 200:
            return Response(content, status, media_type="application/json")
        return json_response(one_model(msgspec.json.decode(content)["data"], name))

    for path in PROMPTS:
        router.add_api_route(path, hand_over, methods=["POST"])
    for path in QUESTIONS:
        router.add_api_route(path, question, methods=["GET"])
    router.add_api_route(f"{MODELS}/{{name:path}}", model, methods=["GET"])
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
        record.began(request_id, SamplingParams())  # the client's are the prefill server's to read
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        headers = {name: given[name] for name in PASSED_ON if name in given}
        headers |= {"x-request-id": request_id, "content-type": "application/json"}
        try:
            answer = await self._gateway.hand_over(request_id, scope["path"], self._body, headers)
        except HeadraceError as error:
            record.failed(error.info)
            return error_response(error.info)
        record.ended(GenerationResult(finish_reason=None, usage=Usage(0, 0, 0), timing=Timing(), kv="handed_over"))
        return Response(answer, media_type="application/json")
