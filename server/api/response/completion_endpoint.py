"""The steps of every completions route, whatever its API: read, check, run, respond.

body ─► CompletionRequest ─► GenerationRequests ─┬─ prefill server: first tokens, kv_transfer_params
                                                 └─ others: whole response, or a stream
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.messages.replies import Progress
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.request.completion_request import CompletionRequest, decode_requests, prefill_requests
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.refusal import notify_peers_on_refusal
from headrace.server.api.request.router_headers import with_router_headers
from headrace.server.api.request.schema import GenerateBody, GrowingBody, OpenAIBody, TokensBody
from headrace.server.api.request.terms import with_client_terms
from headrace.server.api.response.choices import Choice, Output, collect_choices, run_choices
from headrace.server.api.response.handoff_response import prefill_choices, transfer_params
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.link.control_address import ControlAddress
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompt, OpenPrompts
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationRequest, GenerationResult
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import EventStream, EventWriter, JsonAnswer


class AnswerFormat(Protocol):
    """The JSON of one API. An instance serves one response. index: position of a choice in the response."""

    async def body(self, outputs: Sequence[Output]) -> Any:
        """The whole response."""
        ...

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """Write the event that the prefill has got further."""
        ...

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """Write the event of new text. choice: all of it so far, the delta included."""
        ...

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """Write the event that a choice has ended."""
        ...

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """Write what follows when all choices have ended."""
        ...

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """End a stream that failed after its first event."""
        ...


B = TypeVar("B", bound=OpenAIBody | GenerateBody | TokensBody)
Check = Callable[[B], Awaitable[CompletionRequest]]  # tokenizes and checks; raises HeadraceError
MakeFormat = Callable[[B, CompletionRequest, Sequence[GenerationRequest]], AnswerFormat]


class Opener(Protocol):
    """Takes bodies of prompts that are open, or are to be."""

    async def take(self, http: Request, body: Any) -> "Response | tuple[Any, OpenPrompt]":
        """The response to a body whose prompt is open; or the body of the whole prompt that is committed, and which
        prompt that is. Raises HeadraceError."""
        ...


class CompletionEndpoint:
    """Answers completions requests in the role of this server."""

    def __init__(
        self,
        model: ServedModel,
        completions: Completions,
        control: ControlAddress,
        config: ServerConfig,
        budget: BodyBudget,
        prompts: OpenPrompts,
        opener: Opener,
    ) -> None:
        self._model = model
        self._completions = completions
        self._control = control
        self._config = config
        self._budget = budget
        self._prompts = prompts
        self._opener = opener

    async def respond(self, http: Request, kind: type[B], check: Check[B], make_format: MakeFormat[B]) -> Response:
        """The response to an HTTP request with a body of this kind. Raises HeadraceError if it is refused, after
        notifying the peers of its tickets."""
        config = self._config
        raw = await read_body(http, config.max_body_bytes, self._budget)
        async with notify_peers_on_refusal(self._completions, config, raw):
            body, prompt = await decode_body(raw, kind), None
            if isinstance(body, GrowingBody) and body.headrace is not None:
                taken = await self._opener.take(http, body)
                if isinstance(taken, Response):
                    return taken
                body, prompt = taken
            completion = await check(body)
            base = with_client_terms(completion.base, http, config)
            completion = msgspec.structs.replace(completion, base=base)
            if config.role == "prefill":
                requests = prefill_requests(completion, body, self._model.max_model_len)
            else:
                requests = decode_requests(completion, body, self._model.max_model_len, config)
                requests = with_router_headers(requests, http.headers, config)
            form = make_format(body, completion, requests)
            if prompt is not None:
                await self._prompts.commit(prompt)
                requests = [msgspec.structs.replace(each, prefer=prompt.server) for each in requests]
        if config.role == "prefill":
            host = http.url.hostname or ""
            return JsonAnswer(lambda: self._prefill(completion, requests, form, host))  # never a stream
        if body.stream:
            return EventStream(lambda events: self._stream(requests, form, events, prompt), form.write_error)
        return JsonAnswer(lambda: self._whole(requests, form, prompt))

    async def _whole(
        self, requests: Sequence[GenerationRequest], form: AnswerFormat, prompt: OpenPrompt | None
    ) -> object:
        async with self._prompts.reopening(prompt):
            return await form.body(await collect_choices(self._completions, requests))

    async def _prefill(
        self, completion: CompletionRequest, requests: Sequence[GenerationRequest], form: AnswerFormat, host: str
    ) -> object:
        outputs = await prefill_choices(self._completions, self._model.tokenizer, requests)
        body = await form.body(outputs)
        if requests[0].hold and not completion.list_response:
            results = [result for _, result in outputs]
            body.kv_transfer_params = transfer_params(self._control, host, completion.prompts, requests, results)
        return body

    async def _stream(
        self,
        requests: Sequence[GenerationRequest],
        form: AnswerFormat,
        events: EventWriter,
        prompt: OpenPrompt | None,
    ) -> None:
        choices = [Choice() for _ in requests]

        async def emit(index: int, event: Progress | GenerationDelta) -> None:
            if isinstance(event, Progress):
                await form.write_progress(events, index, event)
            else:
                choices[index].add(event)
                await form.write_delta(events, index, choices[index], event)

        async def finished(index: int, result: GenerationResult) -> None:
            await form.write_finished(events, index, choices[index], result)

        async with self._prompts.reopening(prompt):
            await form.write_end(events, await run_choices(self._completions, requests, emit, finished))
