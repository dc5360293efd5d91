"""POST /generate: SGLang's own completions."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.types.errors import invalid
from headrace.server.api.description.operation import COMPLETION_ERRORS, COMPLETION_HEADERS, described
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.constraint import generate_constraint
from headrace.server.api.request.explain import renaming
from headrace.server.api.request.prompts import MAX_PROMPTS, Prompt, check_model, encode_all
from headrace.server.api.request.sampling import sampling_params
from headrace.server.api.request.schema import GenerateBody, GenerateSampling, OpenAIBody, SamplingFields
from headrace.server.api.request.terms import base_request, client_of, prefix_salt
from headrace.server.api.response.completion_endpoint import CompletionEndpoint
from headrace.server.api.sglang.generate_format import GenerateFormat, GenerateReply
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.upstream.handoff_params import prompt_ids

MAX_NEW_TOKENS = 128  # SGLang's default
MAX_RID_CHARS = 128
_SAMPLING_NAMES = {
    "min_tokens": "sampling_params.min_new_tokens",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "logit_bias": "sampling_params.logit_bias",
}  # by those of other routes
_GENERATE = described(
    "Continue texts, in SGLang's API",
    body=GenerateBody,
    reply=GenerateReply | list[GenerateReply],
    events=(GenerateReply,),
    errors=COMPLETION_ERRORS,
    parameters=COMPLETION_HEADERS,
)


def generate_routes(model: ServedModel, endpoint: CompletionEndpoint) -> APIRouter:
    """Routes of SGLang's API."""
    router = APIRouter()

    @router.post("/generate", openapi_extra=_GENERATE)
    async def generate(http: Request) -> Response:
        return await endpoint.respond(http, GenerateBody, partial(_check_generate, model, client_of(http)), make_format)

    def make_format(
        body: GenerateBody, completion: CompletionRequest, requests: Sequence[GenerationRequest]
    ) -> GenerateFormat:
        incremental = bool(body.incremental_streaming_output)
        return GenerateFormat(requests, as_list=completion.list_response, incremental=incremental)

    return router


async def _check_generate(model: ServedModel, client: str, body: GenerateBody) -> CompletionRequest:
    """The prompts, tokenized and checked. Raises HeadraceError (400, 404)."""
    with renaming(_SAMPLING_NAMES):
        check_model(model, body.model)
        fields = _openai_fields(body)
        constraint = await generate_constraint(model, client, body.sampling_params or GenerateSampling())
        prompts, is_batch = _prompts(body)
        sampling = sampling_params(
            fields,
            logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
            max_tokens=MAX_NEW_TOKENS,
            vocab_size=model.vocab_size,
        )
        if body.return_hidden_states:
            sampling = msgspec.structs.replace(sampling, hidden_states="all")
        field = "text" if body.text is not None else "input_ids"
        given = prompt_ids(body, len(prompts)) or prompts
        tokens = await encode_all(model, given, field, indexed=is_batch)
        _check_start(body, tokens)
        rids = _rids(body, len(prompts))
        base = base_request(rids[0], fields, sampling, constraint)
        count = fields.n or 1
        salts = _salts(body, len(prompts))
        if body.return_hidden_states:
            _check_hidden(model, tokens, sampling.max_tokens, count)
        return CompletionRequest(base, tokens, count, salts, rids, list_response=is_batch or count > 1)


def _check_hidden(model: ServedModel, prompts: Sequence[Sequence[int]], max_tokens: int, choices: int) -> None:
    """Raises HeadraceError (413) if the hidden states of the prompts and of all that they may generate are too many."""
    room = model.max_model_len or max_tokens
    tokens = sum(len(prompt) + min(max_tokens, max(0, room - len(prompt))) for prompt in prompts)
    model.hidden.check("return_hidden_states", tokens * choices)


def _rids(body: GenerateBody, prompts: int) -> list[str]:
    """A request id for each prompt, which begins with the client's. Raises HeadraceError (400)."""
    given = _for_each("rid", body.rid or f"gen-{secrets.token_hex(16)}", prompts)
    for rid in given:
        if rid is None or not rid.isprintable() or len(rid) > MAX_RID_CHARS:
            message = f"rid has {len(rid or '')} characters; at most {MAX_RID_CHARS} printable ones are allowed"
            raise invalid("rid", message)
    own = secrets.token_hex(4)
    return [f"{rid}-{own}" for rid in given]


def _salts(body: GenerateBody, prompts: int) -> list[str]:
    """Prefix-cache salt of each prompt. Raises HeadraceError (400)."""
    salts = _for_each("cache_salt", body.cache_salt, prompts)
    keys = _for_each("extra_key", body.extra_key, prompts)
    return [prefix_salt(salt, key) for salt, key in zip(salts, keys, strict=True)]


def _for_each(field: str, value: str | list[str] | None, prompts: int) -> Sequence[str | None]:
    """The value of a field for each prompt. Raises HeadraceError (400) for a list of another length."""
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        message = f"{field} has {len(value)} entries and the request has {prompts} prompts; send {prompts} or a string"
        raise invalid(field, message)
    return value


def _check_start(body: GenerateBody, prompts: Sequence[Sequence[int]]) -> None:
    """Raises HeadraceError (400) if the logprobs are to start where a prompt has no token."""
    start, shortest = body.logprob_start_len, min(map(len, prompts))
    if body.return_logprob and start is not None and start >= shortest:
        message = f"logprob_start_len is {start}; the prompt has {shortest} tokens, so it has to be below that, or -1"
        raise invalid("logprob_start_len", message)


def _openai_fields(body: GenerateBody) -> OpenAIBody:
    """The sampling fields under the names of the other routes."""
    given = body.sampling_params or GenerateSampling()
    start = -1 if body.logprob_start_len is None or not body.return_logprob else body.logprob_start_len
    values = msgspec.structs.asdict(given)
    return OpenAIBody(
        **{name: values[name] for name in SamplingFields.__struct_fields__},
        model=body.model,
        seed=given.sampling_seed,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        no_stop_trim=given.no_stop_trim,
        n=given.n,
        prompt_logprobs=(body.top_logprobs_num or 0) if start >= 0 else None,
        # SGLang's own list begins with the token at logprob_start_len, which has no logprob there.
        prompt_logprobs_start=start + 1 if start >= 0 else None,
        priority=body.priority,
        slo_ttft_ms=body.slo_ttft_ms,
        data_parallel_rank=body.data_parallel_rank,
        kv_transfer_params=body.kv_transfer_params,
        kv_hints=body.kv_hints,
        session_id=body.session_id,
    )


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list. Raises HeadraceError (400)."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "send exactly one of text and input_ids")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        prompts: list[Prompt] = list(body.text)
    else:
        ids = body.input_ids or []
        kinds = set(map(type, ids))
        if len(kinds) > 1:
            raise invalid("input_ids", "input_ids mixes token ids and lists; send one kind", code="invalid_type")
        if kinds != {list}:
            return [cast(list[int], ids)], False
        prompts = cast(list[Prompt], ids)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        field = "input_ids" if body.text is None else "text"
        raise invalid(field, f"{field} has {len(prompts)} prompts; 1 to {MAX_PROMPTS} fit in one request")
    return prompts, True
