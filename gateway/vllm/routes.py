"""Routes of a gateway: what routers ask a vLLM prefill server for, and operations."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.config import GatewayConfig
from headrace.gateway.operations import gateway_app, one_model
from headrace.gateway.vllm.bodies import (
    AnyGatewayBody,
    GatewayChat,
    GatewayCompletion,
    GatewayTokens,
    wrong_place,
)
from headrace.gateway.vllm.front import (
    CHAT_PATH,
    COMPLETION_PATH,
    TOKENS_PATH,
    Front,
    HandoffAnswer,
    Served,
    chat_completion,
    completion,
    generated_tokens,
)
from headrace.gateway.vllm.gateway import VllmGateway
from headrace.server.api.request.parse import decode_body
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import ClientDisconnected, json_response, until_disconnect

_ELSEWHERE = ("/v1/responses", "/v1/embeddings", "/v1/messages", "/generate")


def create_vllm_app(gateway: VllmGateway) -> FastAPI:
    """All routes. The caller starts and stops the gateway."""
    return gateway_app("Headrace gateway", gateway, lambda budget: _prompt_routes(gateway, gateway.config, budget))


def _prompt_routes(gateway: VllmGateway, config: GatewayConfig, budget: BodyBudget) -> APIRouter:
    router = APIRouter()

    async def answer(http: Request, kind: type[AnyGatewayBody], form: Callable[[HandoffAnswer], object]) -> Response:
        front = gateway.require_front()
        raw = await read_body(http, config.max_body_bytes, budget)
        body = await decode_body(raw, kind)
        record: RequestRecord = http.scope["state"]["record"]
        return HandoffResponse(gateway, front, lambda: front.serve(body, raw, record), form)

    @router.post(COMPLETION_PATH)
    async def completions(http: Request) -> Response:
        return await answer(http, GatewayCompletion, completion)

    @router.post(CHAT_PATH)
    async def chat_completions(http: Request) -> Response:
        return await answer(http, GatewayChat, chat_completion)

    @router.post(TOKENS_PATH)
    async def tokens(http: Request) -> Response:
        return await answer(http, GatewayTokens, generated_tokens)

    async def elsewhere() -> Response:
        raise wrong_place()

    for path in _ELSEWHERE:
        router.add_api_route(path, elsewhere, methods=["POST"])

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": gateway.models()})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(one_model(gateway.models(), name))

    return router


class HandoffResponse(Response):
    """The answer to a prefill request. KV of an answer that the client does not get is offered no longer."""

    def __init__(
        self,
        gateway: VllmGateway,
        front: Front,
        work: Callable[[], Coroutine[Any, Any, Served]],
        form: Callable[[HandoffAnswer], object],
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._front = front
        self._work = work
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the prompt over and answer; gives both up if the client disconnects."""
        with self._gateway.counted():
            try:
                await until_disconnect(receive, self._answer(scope, receive, send))
            except ClientDisconnected:
                return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = await self._work()
        began = self._gateway.clock.now()
        try:
            await json_response(self._form(served.answer))(scope, receive, send)
        except BaseException:
            self._front.unsent(served)
            raise
        self._front.sent(served, self._gateway.clock.now() - began)
