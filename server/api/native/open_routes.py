"""PATCH and GET /v1/prefill/{id}, its commit and truncate: prompts that were opened by POST /v1/prefill with open."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.server.api.description.operation import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    GENERATION_HEADERS,
    Parameter,
    described,
)
from headrace.server.api.native.prefill_routes import (
    OpenPromptReply,
    PrefillProgress,
    PrefillReply,
    PrefillResponder,
    Run,
)
from headrace.server.api.request.open_prompt import append, committed, open_prompt, truncate
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.schema import AppendBody, CommitBody, PrefillBody, TruncateBody
from headrace.server.api.request.terms import tenant_of
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompt, OpenPrompts
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import json_response

_ID = (Parameter("id", "path", str, "The id of an open prompt."),)
_STATE = described("The state of an open prompt", reply=OpenPromptReply, errors=(404, 409), parameters=_ID)
_APPEND = described(
    "Append to an open prompt", body=AppendBody, reply=OpenPromptReply, errors=(*BODY_ERRORS, 409), parameters=_ID
)
_TRUNCATE = described(
    "Go back in an open prompt", body=TruncateBody, reply=OpenPromptReply, errors=(*BODY_ERRORS, 409), parameters=_ID
)
_COMMIT = described(
    "Compute what is left of an open prompt, and send or hold its KV",
    body=CommitBody,
    reply=PrefillReply,
    events=(PrefillProgress, PrefillReply),
    errors=GENERATION_ERRORS,
    parameters=(*_ID, *GENERATION_HEADERS),
)


class OpenPromptOpener:
    """Answers POST /v1/prefill with open."""

    def __init__(self, model: ServedModel, prompts: OpenPrompts, config: ServerConfig) -> None:
        self._model = model
        self._prompts = prompts
        self._config = config

    async def respond(self, http: Request, body: PrefillBody) -> Response:
        """The response with the id. Raises HeadraceError."""
        return state_reply(self._prompts, await open_prompt(self._model, self._prompts, self._config, http, body))


def open_routes(
    model: ServedModel, prompts: OpenPrompts, responder: PrefillResponder, config: ServerConfig, budget: BodyBudget
) -> APIRouter:
    """What is done with a prompt after its opening."""
    router = APIRouter()

    @router.get("/v1/prefill/{id}", openapi_extra=_STATE)
    async def state(id: str, http: Request) -> Response:
        return state_reply(prompts, prompts.get(id, tenant_of(http)))

    @router.patch("/v1/prefill/{id}", openapi_extra=_APPEND)
    async def patch(id: str, http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), AppendBody)
        prompt = prompts.get(id, tenant_of(http))
        await append(model, prompts, prompt, body.append)
        return state_reply(prompts, prompt)

    @router.post("/v1/prefill/{id}/truncate", openapi_extra=_TRUNCATE)
    async def shorten(id: str, http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), TruncateBody)
        prompt = prompts.get(id, tenant_of(http))
        await truncate(model, prompts, prompt, body)
        return state_reply(prompts, prompt)

    @router.post("/v1/prefill/{id}/commit", openapi_extra=_COMMIT)
    async def commit(id: str, http: Request) -> Response:
        fields = await decode_body(await read_body(http, config.max_body_bytes, budget), CommitBody)
        prompt = prompts.get(id, tenant_of(http))
        async with prompt.lock:
            body = committed(prompt, fields)
            request = await responder.request(http, body)
            await prompts.commit(prompt)
        return responder.respond(request, stream=bool(body.stream), guard=lambda run: _reopening(prompts, prompt, run))

    return router


def state_reply(prompts: OpenPrompts, prompt: OpenPrompt) -> Response:
    """The state of an open prompt as a response."""
    return json_response(
        OpenPromptReply(
            prompt.id, prompt.ticket, len(prompt.tokens), prompt.stable, prompt.computed, prompts.expires_s(prompt)
        )
    )


async def _reopening(prompts: OpenPrompts, prompt: OpenPrompt, run: Callable[[], Run]) -> PrefillReply:
    """The reply to a commit."""
    async with prompts.reopening(prompt):
        return await run()
