"""POST /v1/completions, POST /v1/chat/completions, POST /v1/responses, GET /v1/models."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.types.request import SamplingParams
from headrace.server.api.openai.answer import OpenAIAnswer
from headrace.server.api.openai.forms import ChatForm, CompletionForm
from headrace.server.api.openai.responses import ResponsesAnswer, input_messages, refuse_unserved
from headrace.server.api.request.body import parse_body, read_body
from headrace.server.api.request.completion import (
    CompletionRequest,
    jobs_to_decode,
    jobs_to_hand_over,
    telling_the_other_side,
)
from headrace.server.api.request.prompts import check_model, completion_prompts, encode, encode_chat
from headrace.server.api.request.sampling import (
    chat_logprobs_wanted,
    choices,
    refuse_unsupported,
    request_fields,
    sampling_params,
)
from headrace.server.api.request.schema import ChatBody, CompletionBody, OpenAIBody, ResponsesBody, StreamOptions
from headrace.server.api.response.answer import json_response
from headrace.server.api.response.handoff import lift_limits
from headrace.server.frontend.generation import Job
from headrace.server.frontend.service import Service
from headrace.server.upstream.handoff_params import HandoffParams, prompt_ids

B = TypeVar("B", bound=OpenAIBody)
Ask = Callable[[Service, B, HandoffParams], Awaitable[CompletionRequest]]
Make = Callable[[Service, CompletionRequest, Sequence[Job]], OpenAIAnswer | ResponsesAnswer]
COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens; chat takes what the model's length leaves


def openai_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Routes of OpenAI's API. A prefill server serves them to routers, which name a ticket and take the first token."""
    router = APIRouter()
    started = int(time.time())

    @router.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "headrace",
            "max_model_len": service.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody, _completions, in_form(CompletionForm))

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatBody, _chat, in_form(ChatForm))

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer(request, ResponsesBody, _responses, ResponsesAnswer)

    async def answer(request: Request, kind: type[B], ask: Ask[B], make: Make) -> Response:
        """ask: what a body of this kind asks for. make: the answer, whichever role gives it."""
        raw = await read_body(request, config.max_body_bytes)
        with telling_the_other_side(service, config, raw):
            names = parse_body(raw, HandoffParams)
            body = parse_body(raw, kind)
            asked = await ask(service, body, names)
            if config.role == "prefill":
                jobs = jobs_to_hand_over(service, asked, names)
                return make(service, asked, jobs).hand_over(request.url.hostname or "")
            return make(service, asked, jobs_to_decode(service, asked, names, config)).respond(body)

    return router


def in_form(form: type[CompletionForm] | type[ChatForm]) -> Make:
    """Makes answers with choices."""

    def make(service: Service, asked: CompletionRequest, jobs: Sequence[Job]) -> OpenAIAnswer:
        shown = form(service.tokens.tokenizer, logprobs=asked.base.sampling.logprobs is not None)
        return OpenAIAnswer(service, shown, asked, jobs)

    return make


async def _completions(service: Service, body: CompletionBody, names: HandoffParams) -> CompletionRequest:
    """Raises HeadraceError (400, 404)."""
    _check(service, body, names)
    prompts = completion_prompts(body.prompt)
    given = prompt_ids(names, len(prompts)) or prompts
    sampling = sampling_params(
        body, logprobs=body.logprobs, max_tokens=COMPLETION_TOKENS, vocab_size=service.vocab_size
    )
    tokens = [
        await encode(service, prompt, "prompt" if len(prompts) == 1 else f"prompt[{index}]")
        for index, prompt in enumerate(given)
    ]
    return CompletionRequest(_base_job("cmpl", body, sampling), tokens, choices(body))


async def _chat(service: Service, body: ChatBody, names: HandoffParams) -> CompletionRequest:
    """Raises HeadraceError (400, 404)."""
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    _check(service, body, names)
    sampling = sampling_params(
        body,
        logprobs=chat_logprobs_wanted(body),
        max_tokens=service.max_model_len or COMPLETION_TOKENS,
        vocab_size=service.vocab_size,
    )
    given = prompt_ids(names, 1)
    tokens = await encode(service, given[0], "prompt") if given else await encode_chat(service, body.messages)
    return CompletionRequest(_base_job("chatcmpl", body, sampling), [tokens], choices(body))


async def _responses(service: Service, body: ResponsesBody, names: HandoffParams) -> CompletionRequest:
    """Raises HeadraceError (400, 404)."""
    refuse_unserved(body)
    body.max_tokens = body.max_output_tokens
    _check(service, body, names)
    limit = service.max_model_len or COMPLETION_TOKENS
    sampling = sampling_params(body, logprobs=None, max_tokens=limit, vocab_size=service.vocab_size)
    if given := prompt_ids(names, 1):
        tokens = await encode(service, given[0], "input")
    else:
        tokens = await encode_chat(service, input_messages(body), "input", instructions=body.instructions)
    return CompletionRequest(_base_job("resp", body, sampling), [tokens], 1)


def _check(service: Service, body: OpenAIBody, names: HandoffParams) -> None:
    check_model(service, body.model)
    refuse_unsupported(body)
    lift_limits(body, names)


def _base_job(prefix: str, body: OpenAIBody, sampling: SamplingParams) -> Job:
    """What all choices of one request share."""
    options = body.stream_options or StreamOptions()
    return Job(
        rid=f"{prefix}-{secrets.token_hex(16)}",
        prompt=(),
        sampling=sampling,
        progress=bool(body.stream and options.include_progress),
        **request_fields(body),
    )
