"""Prompts of OpenAI's routes that are opened, appended to and committed: the field headrace of their bodies."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import invalid
from headrace.server.api.openai.replies import OpenReply, OpenReport
from headrace.server.api.request.open_prompt import change, continued, open_prompt
from headrace.server.api.request.prompts import OpenBody
from headrace.server.api.request.schema import ChatBody, CompletionBody
from headrace.server.api.request.terms import tenant_of
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompt, OpenPrompts
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.streaming import json_response


class CompletionOpener:
    """Takes bodies with the field headrace."""

    def __init__(self, model: ServedModel, prompts: OpenPrompts, config: ServerConfig) -> None:
        self._model = model
        self._prompts = prompts
        self._config = config

    async def take(self, http: Request, body: ChatBody | CompletionBody) -> Response | tuple[OpenBody, OpenPrompt]:
        """The response to a body whose prompt is open; or the body of the whole prompt that is committed, and which
        prompt that is. Raises HeadraceError (400, 404, 409, 429)."""
        fields = body.headrace
        assert fields is not None, "others are not taken"
        if self._config.role == "prefill":
            text = "a prefill server does not generate: open prompts there by POST /v1/prefill"
            raise invalid("headrace", text, code="wrong_role")
        if fields.open and body.stream:
            raise invalid("stream", "an open prompt generates nothing that could be streamed; send stream to commit it")
        own = msgspec.structs.replace(body, headrace=None)
        if fields.open_id is None:
            if not fields.open:
                raise invalid("headrace", "headrace has neither open nor open_id", code="missing_field")
            return self._reply(await open_prompt(self._model, self._prompts, self._config, http, own))
        prompt = self._prompts.get(fields.open_id, tenant_of(http))
        async with prompt.lock:
            whole = continued(prompt.content, own)
            if not fields.open:
                return whole, prompt
            await change(self._model, self._prompts, prompt, whole)
        return self._reply(prompt)

    def _reply(self, prompt: OpenPrompt) -> Response:
        report = OpenReport(len(prompt.tokens), prompt.stable, prompt.computed, self._prompts.expires_s(prompt))
        name = self._model.called(prompt.request.model)
        return json_response(
            OpenReply(
                id=prompt.id, object="open_prompt", created=int(wall_time()), model=name, choices=[], headrace=report
            )
        )
