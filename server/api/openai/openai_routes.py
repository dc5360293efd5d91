"""POST /v1/completions, POST /v1/chat/completions, POST /v1/responses, GET /v1/models, GET /v1/models/{model}."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.runtime.clock import wall_time
from headrace.server.api.description.operation import COMPLETION_ERRORS, COMPLETION_HEADERS, Parameter, described
from headrace.server.api.openai import replies
from headrace.server.api.openai.answer_form import AnswerForm
from headrace.server.api.openai.checks import check_chat, check_completion, check_response
from headrace.server.api.openai.choice_forms import ChatForm, ChoiceForm, CompletionForm
from headrace.server.api.openai.choices_format import ChoicesFormat
from headrace.server.api.openai.echo import Echo
from headrace.server.api.openai.responses_format import ResponsesFormat
from headrace.server.api.openai.token_ids import ReturnedTokenIds
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.prompts import (
    check_model,
)
from headrace.server.api.request.schema import ChatBody, CompletionBody, ResponsesBody
from headrace.server.api.request.terms import client_of
from headrace.server.api.response.completion_endpoint import CompletionEndpoint
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.streaming import json_response

_COMPLETIONS = described(
    "Continue texts",
    body=CompletionBody,
    reply=replies.CompletionReply,
    other_replies=(replies.OpenReply,),
    events=(replies.CompletionReply,),
    errors=COMPLETION_ERRORS,
    parameters=COMPLETION_HEADERS,
)
_CHAT = described(
    "Continue a conversation",
    body=ChatBody,
    reply=replies.ChatReply,
    other_replies=(replies.OpenReply,),
    events=(replies.ChatChunk,),
    errors=COMPLETION_ERRORS,
    parameters=COMPLETION_HEADERS,
)
_RESPONSES = described(
    "Continue a conversation, in OpenAI's newer API; nothing is stored",
    body=ResponsesBody,
    reply=replies.ResponsesReply,
    events=(replies.ResponsesEvent,),
    errors=COMPLETION_ERRORS,
    parameters=COMPLETION_HEADERS,
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
        return choices_format(body, completion, form)

    def chat_format(body: ChatBody, completion: CompletionRequest, _: Sequence[GenerationRequest]) -> ChoicesFormat:
        logprobs = completion.base.sampling.logprobs is not None
        form: ChoiceForm = ChatForm(model.tokenizer, logprobs=logprobs)
        if completion.answers.parsed:
            form = AnswerForm(model.tokenizer, completion.answers, logprobs=logprobs)
        return choices_format(body, completion, form)

    def choices_format(
        body: CompletionBody | ChatBody, completion: CompletionRequest, form: ChoiceForm
    ) -> ChoicesFormat:
        ids = ReturnedTokenIds(completion) if body.return_token_ids else None
        return ChoicesFormat(completion, model.called(completion.base.model), form, body.stream_options, ids)

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
        check = partial(check_completion, model, client_of(http))
        return await endpoint.respond(http, CompletionBody, check, completions_format)

    @router.post("/v1/chat/completions", openapi_extra=_CHAT)
    async def chat(http: Request) -> Response:
        return await endpoint.respond(http, ChatBody, partial(check_chat, model, client_of(http)), chat_format)

    @router.post("/v1/responses", openapi_extra=_RESPONSES)
    async def responses(http: Request) -> Response:
        check = partial(check_response, model, client_of(http))
        return await endpoint.respond(http, ResponsesBody, check, responses_format)

    return router
