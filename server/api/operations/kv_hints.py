"""POST /v1/kv_hints: hints about a prompt's KV without a request, before a turn or when a conversation has ended."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.types.errors import invalid
from headrace.core.types.requests.kv_hints import HintAnswer, understood
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.api.description.operation import BODY_ERRORS, described
from headrace.server.api.operations.tokenization import tokens_of
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.prompts import check_model, encode
from headrace.server.api.request.schema import KvHintsBody
from headrace.server.api.request.terms import prefix_salt, tenant_of
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import json_response


class KvHintsReply(msgspec.Struct):
    """Of POST /v1/kv_hints."""

    message_id: str
    kv_hints: list[HintAnswer]
    """What was granted, in the order of the actions."""


_KV_HINTS = described(
    "Say what is to become of a prompt's KV", body=KvHintsBody, reply=KvHintsReply, errors=BODY_ERRORS
)


def kv_hint_routes(model: ServedModel, completions: Completions, config: ServerConfig, budget: BodyBudget) -> APIRouter:
    """POST /v1/kv_hints, in every role: of the cache of this server."""
    router = APIRouter()

    @router.post("/v1/kv_hints", openapi_extra=_KV_HINTS)
    async def kv_hints(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), KvHintsBody)
        check_model(model, body.model)
        prompt = await _prompt(model, body)
        terms = RequestTerms(tenant=tenant_of(http), cache_salt=prefix_salt(body.cache_salt, body.extra_key))
        hints = [understood(action) for action in body.kv_hints.actions]
        granted = await completions.hint(prompt, terms, hints, body.model or "")
        return json_response(KvHintsReply(body.kv_hints.message_id, granted))

    return router


async def _prompt(model: ServedModel, body: KvHintsBody) -> tuple[int, ...]:
    """Token ids. Raises HeadraceError (400) unless the prompt is given in one field."""
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid(given[-1] if given else "prompt", "send exactly one of prompt, prompt_token_ids and messages")
    if body.prompt_token_ids is not None:
        return await encode(model, body.prompt_token_ids, "prompt_token_ids")
    return await tokens_of(model, body)
