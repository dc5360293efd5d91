"""POST /v1/completions/render and /v1/chat/completions/render: the bodies of POST /inference/v1/generate that do what a
completion or a chat would, as in vLLM. Nothing is computed."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.server.api.description.operation import BODY_ERRORS, described
from headrace.server.api.openai.checks import check_chat, check_completion
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.sampling import refuse_fields
from headrace.server.api.request.schema import ChatBody, CompletionBody, OpenAIBody, StreamOptions
from headrace.server.api.request.terms import client_of
from headrace.server.api.response.usage import MORE
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import json_response


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """A body of POST /inference/v1/generate, by vLLM's names."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling_params: dict[str, Any]
    """Without those that have vLLM's defaults."""
    model: str
    features: None = None
    """Text alone is rendered."""
    reasoning_ended: bool | None = None
    """true where structured_outputs have a place for the reasoning before."""
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None = None
    slo_ttft_ms: float = MORE
    deadline_s: float = MORE
    data_parallel_rank: int = MORE


_COMPLETIONS = described(
    "The body of POST /inference/v1/generate for each prompt of a completion",
    body=CompletionBody,
    reply=list[RenderedPrompt],
    errors=BODY_ERRORS,
)
_CHAT = described(
    "The body of POST /inference/v1/generate for a conversation",
    body=ChatBody,
    reply=RenderedPrompt,
    errors=BODY_ERRORS,
)


def render_routes(model: ServedModel, config: ServerConfig, budget: BodyBudget) -> APIRouter:
    """Texts and conversations as token ids, with all that their bodies ask for; in every role."""
    router = APIRouter()

    @router.post("/v1/completions/render", openapi_extra=_COMPLETIONS)
    async def completions(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), CompletionBody)
        refuse_fields({"echo": bool(body.echo), "best_of": body.best_of is not None, **_not_rendered(body)})
        return json_response(_rendered(model, body, await check_completion(model, client_of(http), body)))

    @router.post("/v1/chat/completions/render", openapi_extra=_CHAT)
    async def chat(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), ChatBody)
        refuse_fields(_not_rendered(body))
        completion = await check_chat(model, client_of(http), body)
        refuse_fields({"messages": bool(completion.base.images)})
        return json_response(_rendered(model, body, completion)[0])

    return router


def _not_rendered(body: OpenAIBody) -> Mapping[str, bool]:
    """Fields that have no place in what is rendered: a handoff is named when the ids are sent."""
    return {
        "kv_transfer_params": body.kv_transfer_params is not None,
        "bootstrap_room": body.bootstrap_room is not None,
        "prompt_logprobs_start": body.prompt_logprobs_start is not None,
    }


def _rendered(model: ServedModel, body: OpenAIBody, completion: CompletionRequest) -> list[RenderedPrompt]:
    """One for each prompt."""
    requests = completion.requests(model.max_model_len)[:: completion.choices]
    several = len(requests) > 1
    rid, terms, stream = completion.base.rid, completion.base.terms, bool(body.stream)
    return [
        RenderedPrompt(
            request_id=f"{rid}-{index}" if several else rid,
            token_ids=request.prompt,
            sampling_params=_sampling(request, completion.choices),
            model=body.model or model.name,
            reasoning_ended=None if request.constraint is None else True,
            stream=stream,
            stream_options=body.stream_options if stream else None,
            cache_salt=terms.cache_salt or None,
            priority=terms.priority,
            slo_ttft_ms=MORE if body.slo_ttft_ms is None else body.slo_ttft_ms,
            deadline_s=MORE if body.deadline_s is None else body.deadline_s,
            data_parallel_rank=MORE if body.data_parallel_rank is None else body.data_parallel_rank,
        )
        for index, request in enumerate(requests)
    ]


def _sampling(request: GenerationRequest, choices: int) -> dict[str, Any]:
    """sampling_params of a request. The room that its prompt leaves bounds max_tokens."""
    sampling, constraint = request.sampling, request.constraint
    given: dict[str, Any] = {**msgspec.to_builtins(sampling), "max_tokens": sampling.max_tokens}
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if constraint is not None:
        text = json.loads(constraint.text) if constraint.kind == "choice" else constraint.text
        given["structured_outputs"] = {constraint.kind: text}
    more = {
        "n": choices if choices > 1 else None,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.keep_stop,
    }
    return {**given, **{name: value for name, value in more.items() if value}}
