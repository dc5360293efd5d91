"""POST /inference/v1/generate: token ids in, token ids out, as in vLLM."""

import secrets
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.types.errors import invalid
from headrace.server.api.description.operation import COMPLETION_ERRORS, COMPLETION_HEADERS, described
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.constraint import body_constraint
from headrace.server.api.request.explain import renaming
from headrace.server.api.request.prompts import check_model, encode
from headrace.server.api.request.sampling import sampling_params
from headrace.server.api.request.schema import OpenAIBody, TokenSampling, TokensBody
from headrace.server.api.request.terms import base_request, client_of
from headrace.server.api.response.completion_endpoint import CompletionEndpoint
from headrace.server.api.vllm.token_format import TokensChunk, TokensFormat, TokensReply
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.upstream.handoff_params import prompt_ids

GENERATE_PATH = "/inference/v1/generate"
MAX_ID_CHARS = 128
DEFAULT_TOKENS = 16  # of a model whose length is not known
_OPENAI_FIELDS = tuple(name for name in TokenSampling.__struct_fields__ if name in OpenAIBody.__struct_fields__)
_SAMPLING_NAMES = {name: f"sampling_params.{name}" for name in _OPENAI_FIELDS}
_GENERATE = described(
    "Continue token ids, in vLLM's API",
    body=TokensBody,
    reply=TokensReply,
    events=(TokensChunk,),
    errors=COMPLETION_ERRORS,
    parameters=COMPLETION_HEADERS,
)


def token_routes(model: ServedModel, endpoint: CompletionEndpoint) -> APIRouter:
    """Tokens in, tokens out. A prefill server has it for routers, which name a ticket and take the first token."""
    router = APIRouter()

    @router.post(GENERATE_PATH, openapi_extra=_GENERATE)
    async def generate(http: Request) -> Response:
        check = partial(_check_tokens, model, client_of(http))
        return await endpoint.respond(http, TokensBody, check, make_format)

    def make_format(
        body: TokensBody, completion: CompletionRequest, _requests: Sequence[GenerationRequest]
    ) -> TokensFormat:
        return TokensFormat(body, completion, model)

    return router


async def _check_tokens(model: ServedModel, client: str, body: TokensBody) -> CompletionRequest:
    """The prompt and its sampling, checked. Raises HeadraceError (400, 404)."""
    check_model(model, body.model)
    with renaming(_SAMPLING_NAMES):
        fields = _openai_fields(body)
        constraint = await body_constraint(model, client, fields)
        limit = model.max_model_len or DEFAULT_TOKENS
        logprobs = None if body.sampling_params is None else body.sampling_params.logprobs
        sampling = sampling_params(fields, logprobs=logprobs, max_tokens=limit, vocab_size=model.vocab_size)
    if constraint is not None and body.reasoning_ended is False:
        text = "reasoning_ended is false: what a text has to match applies from its first token on; leave it out"
        raise invalid("reasoning_ended", text, code="unsupported")
    given = prompt_ids(body, 1) or (body.token_ids,)
    tokens = await encode(model, given[0], "token_ids")
    return CompletionRequest(base_request(_rid(body), fields, sampling, constraint), [tokens], fields.n or 1)


def _rid(body: TokensBody) -> str:
    """A request id that begins with the client's. Raises HeadraceError (400)."""
    given = body.request_id or "gen-tokens"
    if not given.isprintable() or len(given) > MAX_ID_CHARS:
        message = f"request_id has {len(given)} characters; at most {MAX_ID_CHARS} printable ones are allowed"
        raise invalid("request_id", message)
    return f"{given}-{secrets.token_hex(16)}"


def _openai_fields(body: TokensBody) -> OpenAIBody:
    """The fields of the body under the names of the other routes."""
    given = body.sampling_params or TokenSampling()
    return OpenAIBody(
        **{name: getattr(given, name) for name in _OPENAI_FIELDS},
        model=body.model,
        priority=body.priority,
        slo_ttft_ms=body.slo_ttft_ms,
        deadline_s=body.deadline_s,
        data_parallel_rank=body.data_parallel_rank,
        cache_salt=body.cache_salt,
        kv_hints=body.kv_hints,
        kv_transfer_params=body.kv_transfer_params,
    )
