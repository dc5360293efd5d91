"""POST /tokenize and POST /detokenize, as in vLLM and SGLang."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.types.errors import invalid
from headrace.server.api.description.operation import BODY_ERRORS, described
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.prompts import check_ids, check_model, encode, encode_chat, template_use
from headrace.server.api.request.schema import DetokenizeBody, TokenizeBody
from headrace.server.api.request.tools import check_tools_taken, offered_functions
from headrace.server.api.response.usage import Count
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import json_response


class TokenizeReply(msgspec.Struct):
    """Of POST /tokenize."""

    tokens: tuple[int, ...]
    count: Count
    max_model_len: int


class DetokenizeReply(msgspec.Struct):
    """Of POST /detokenize."""

    prompt: str


_TOKENIZE = described(
    "Token ids of a text or a conversation", body=TokenizeBody, reply=TokenizeReply, errors=BODY_ERRORS
)
_DETOKENIZE = described("Text of token ids", body=DetokenizeBody, reply=DetokenizeReply, errors=BODY_ERRORS)


def tokenizer_routes(model: ServedModel, config: ServerConfig, budget: BodyBudget) -> APIRouter:
    """Prompts as token ids, and token ids as text; in every role."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=_TOKENIZE)
    async def tokenize(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), TokenizeBody)
        check_model(model, body.model)
        tokens = await tokens_of(model, body)
        return json_response(TokenizeReply(tokens, len(tokens), model.max_model_len))

    @router.post("/detokenize", openapi_extra=_DETOKENIZE)
    async def detokenize(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), DetokenizeBody)
        check_model(model, body.model)
        check_ids(body.tokens, "tokens", model.vocab_size)
        return json_response(DetokenizeReply(await model.tokens.decode(body.tokens)))

    return router


async def tokens_of(model: ServedModel, body: TokenizeBody) -> tuple[int, ...]:
    """Token ids of a text or a conversation. Raises HeadraceError (400) as encode_chat() does."""
    if body.tools and body.messages is None:
        raise invalid("tools", "tools are for messages; a prompt has none")
    if body.messages is None:
        return await encode(model, body.prompt or "", "prompt")
    functions = offered_functions(body.tools or [])
    if functions:
        check_tools_taken(model)
    tokens, _ = await encode_chat(model, body.messages, functions=functions, use=template_use(body))
    return tokens
