"""POST /v1/completions, POST /v1/chat/completions, POST /v1/responses, GET /v1/models, GET /v1/models/{model}."""

import secrets
from collections.abc import Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import invalid
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.request import SamplingParams
from headrace.server.api.description.operation import GENERATION_ERRORS, GENERATION_HEADERS, Parameter, described
from headrace.server.api.openai import replies
from headrace.server.api.openai.answer_form import AnswerForm
from headrace.server.api.openai.choice_forms import ChatForm, ChoiceForm, CompletionForm
from headrace.server.api.openai.choices_format import ChoicesFormat
from headrace.server.api.openai.echo import Echo, check_echo
from headrace.server.api.openai.responses_format import ResponsesFormat, refuse_unsupported_responses
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.constraint import body_constraint
from headrace.server.api.request.prompts import (
    check_model,
    completion_prompts,
    encode_all,
    encode_chat,
    encode_reported,
    input_messages,
    response_template_use,
    template_use,
)
from headrace.server.api.request.reasoning import answer_use
from headrace.server.api.request.sampling import (
    chat_logprobs_wanted,
    check_logprobs_start,
    generated_choices,
    sampling_params,
)
from headrace.server.api.request.schema import ChatBody, CompletionBody, OpenAIBody, ResponsesBody, StreamOptions
from headrace.server.api.request.terms import base_request, client_of, with_images
from headrace.server.api.request.tools import (
    ToolUse,
    forced_calls,
    response_tool_use,
    tool_use,
    with_free_calls,
)
from headrace.server.api.response.completion_endpoint import CompletionEndpoint
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.streaming import json_response
from headrace.server.upstream.handoff_params import prompt_ids

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; for chat it is the rest of the model's length
_COMPLETIONS = described(
    "Continue texts",
    body=CompletionBody,
    reply=replies.CompletionReply,
    events=(replies.CompletionReply,),
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_CHAT = described(
    "Continue a conversation",
    body=ChatBody,
    reply=replies.ChatReply,
    events=(replies.ChatChunk,),
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_RESPONSES = described(
    "Continue a conversation, in OpenAI's newer API; nothing is stored",
    body=ResponsesBody,
    reply=replies.ResponsesReply,
    events=(replies.ResponsesEvent,),
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_MODELS = described("The model that is served, and its adapters", reply=replies.ModelsReply)
_MODEL = described(
    "One model, by the name that requests give",
    reply=replies.ServedModelEntry,
    errors=(404,),
    parameters=(Parameter("name", "path", str, "The name of the model."),),
)


def openai_routes(model: ServedModel, endpoint: CompletionEndpoint) -> APIRouter:
    """Routes of OpenAI's API. A prefill server has them for routers, which name a ticket and take the first token."""
    router = APIRouter()
    started = int(wall_time())

    def completions_format(
        body: CompletionBody, completion: CompletionRequest, requests: Sequence[GenerationRequest]
    ) -> ChoicesFormat:
        echo = Echo(model.tokenizer, body, completion, requests) if body.echo else None
        form = CompletionForm(model.tokenizer, logprobs=body.logprobs is not None, echo=echo)
        return ChoicesFormat(completion, model.called(completion.base.model), form, body.stream_options)

    def chat_format(body: ChatBody, completion: CompletionRequest, _: Sequence[GenerationRequest]) -> ChoicesFormat:
        logprobs = completion.base.sampling.logprobs is not None
        form: ChoiceForm = ChatForm(model.tokenizer, logprobs=logprobs)
        if completion.answers.parsed:
            form = AnswerForm(model.tokenizer, completion.answers, logprobs=logprobs)
        return ChoicesFormat(completion, model.called(completion.base.model), form, body.stream_options)

    def responses_format(
        body: ResponsesBody, completion: CompletionRequest, _: Sequence[GenerationRequest]
    ) -> ResponsesFormat:
        return ResponsesFormat(body, completion, model)

    def entry(name: str) -> replies.ServedModelEntry:
        folder = model.adapters.get(name)
        root, parent = (model.path, None) if folder is None else (folder, model.name)
        return replies.ServedModelEntry(name, "model", started, "headrace", root, parent, model.max_model_len)

    @router.get("/v1/models", openapi_extra=_MODELS)
    async def models() -> Response:
        return json_response(replies.ModelsReply("list", [entry(name) for name in (model.name, *model.adapters)]))

    @router.get("/v1/models/{name:path}", openapi_extra=_MODEL)  # names of a hub have slashes
    async def one_model(name: str) -> Response:
        check_model(model, name)
        return json_response(entry(name))

    @router.post("/v1/completions", openapi_extra=_COMPLETIONS)
    async def completions(http: Request) -> Response:
        check = partial(_check_completion, model, client_of(http))
        return await endpoint.respond(http, CompletionBody, check, completions_format)

    @router.post("/v1/chat/completions", openapi_extra=_CHAT)
    async def chat(http: Request) -> Response:
        return await endpoint.respond(http, ChatBody, partial(_check_chat, model, client_of(http)), chat_format)

    @router.post("/v1/responses", openapi_extra=_RESPONSES)
    async def responses(http: Request) -> Response:
        check = partial(_check_response, model, client_of(http))
        return await endpoint.respond(http, ResponsesBody, check, responses_format)

    return router


async def _check_completion(model: ServedModel, client: str, body: CompletionBody) -> CompletionRequest:
    """The prompts, tokenized and checked. Raises HeadraceError (400, 404)."""
    generated, wanted = generated_choices(body), body.n or 1
    check_echo(body)
    logprobs = 0 if body.logprobs is None and generated > wanted else body.logprobs  # what they are ranked by
    constraint = await _check(model, client, body)
    prompts = completion_prompts(body.prompt, model.max_model_len)
    sampling = sampling_params(body, logprobs=logprobs, max_tokens=COMPLETION_TOKENS, vocab_size=model.vocab_size)
    given = prompt_ids(body, len(prompts)) or prompts
    tokens = await encode_all(model, given, "prompt", indexed=len(prompts) > 1)
    check_logprobs_start(sampling, tokens)
    base = _base_request("cmpl", body, sampling, constraint)
    base = msgspec.structs.replace(base, prompt_only=body.prompt_only)
    return CompletionRequest(base, tokens, generated, best=wanted)


async def _check_chat(model: ServedModel, client: str, body: ChatBody) -> CompletionRequest:
    """The conversation, tokenized and checked. Raises HeadraceError (400, 404)."""
    tools = tool_use(model, body)
    constraint = await _check(model, client, body, tools)
    sampling = sampling_params(
        body,
        logprobs=chat_logprobs_wanted(body),
        max_tokens=model.max_model_len or COMPLETION_TOKENS,
        vocab_size=model.vocab_size,
    )
    given = prompt_ids(body, 1)
    if given:
        tokens, images = await encode_reported(model, given[0], body.messages, "messages")
    else:
        functions = tools.functions if tools else {}
        tokens, images = await encode_chat(model, body.messages, functions=functions, use=template_use(body))
    check_logprobs_start(sampling, [tokens])
    answers, constraint = await answer_use(model, client, body, tokens, tools, constraint)
    base = with_images(_base_request("chatcmpl", body, sampling, constraint), images)
    base = msgspec.structs.replace(base, shown=answers.shown(model))
    return CompletionRequest(base, [tokens], body.n or 1, answers=answers)


async def _check_response(model: ServedModel, client: str, body: ResponsesBody) -> CompletionRequest:
    """The input, tokenized and checked. Raises HeadraceError (400, 404)."""
    refuse_unsupported_responses(body)
    tools = response_tool_use(model, body)
    constraint = await _check(model, client, body, tools)
    limit = model.max_model_len or COMPLETION_TOKENS
    sampling = sampling_params(body, logprobs=None, max_tokens=limit, vocab_size=model.vocab_size)
    messages, places = await input_messages(body)
    if given := prompt_ids(body, 1):
        tokens, images = await encode_reported(model, given[0], messages, "input", places)
    else:
        functions = tools.functions if tools else {}
        tokens, images = await encode_chat(
            model,
            messages,
            "input",
            instructions=body.instructions,
            functions=functions,
            places=places,
            use=response_template_use(body),
        )
    check_logprobs_start(sampling, [tokens])
    answers, constraint = await answer_use(model, client, body, tokens, tools, constraint)
    base = with_images(_base_request("resp", body, sampling, constraint), images)
    base = msgspec.structs.replace(base, shown=answers.shown(model))
    return CompletionRequest(base, [tokens], answers=answers)


async def _check(model: ServedModel, client: str, body: OpenAIBody, tools: ToolUse | None = None) -> Constraint | None:
    """What all bodies have in common; returns their constraint, or that of calls that have to be made."""
    check_model(model, body.model)
    constraint = await body_constraint(model, client, body, await forced_calls(model, client, tools))
    if tools is not None and not tools.forced:
        constraint = await with_free_calls(model, client, tools, constraint)
        if constraint is not None and body.ignore_eos:
            raise invalid("ignore_eos", "ignore_eos and strict tools contradict each other; send one of them")
    return constraint


def _base_request(
    prefix: str, body: OpenAIBody, sampling: SamplingParams, constraint: Constraint | None
) -> GenerationRequest:
    """What all choices of one response have in common."""
    options = body.stream_options or StreamOptions()
    progress = bool(body.stream and options.include_progress)
    return base_request(f"{prefix}-{secrets.token_hex(16)}", body, sampling, constraint, progress=progress)
