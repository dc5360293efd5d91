"""POST /tokenize, POST /detokenize: the model's tokenizer, under the names that vLLM and SGLang give its routes."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.server.api.request.body import parse_body, read_body
from headrace.server.api.request.prompts import check_model, encode, encode_chat
from headrace.server.api.request.schema import ChatMessage
from headrace.server.api.response.answer import json_response
from headrace.server.frontend.service import Service


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def tokenizer_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Prompts as token ids, and token ids as texts; every server has them, whatever its role."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(await read_body(request, config.max_body_bytes), TokenizeBody)
        check_model(service, body.model)
        if body.messages is not None:
            tokens = await encode_chat(service, body.messages)
        else:
            tokens = await encode(service, body.prompt or "", "prompt")
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(await read_body(request, config.max_body_bytes), DetokenizeBody)
        check_model(service, body.model)
        return json_response({"prompt": await service.tokens.decode(body.tokens)})

    return router
