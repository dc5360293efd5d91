"""Answers in OpenAI's two forms: whole, streamed, or that of a prefill server."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from headrace.core.messages.frontend import Progress
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.openai.forms import Form
from headrace.server.api.request.completion import CompletionRequest
from headrace.server.api.request.schema import OpenAIBody, StreamOptions
from headrace.server.api.response.answer import Answer, EventStream, EventWriter
from headrace.server.api.response.choices import Choice, collect, run_choices
from headrace.server.api.response.errors import error_body
from headrace.server.api.response.handoff import hand_over, held_params
from headrace.server.api.response.usage import headrace_report, usage_report
from headrace.server.frontend.generation import Delta, GenerationResult, Job
from headrace.server.frontend.service import Service


class OpenAIAnswer:
    """One request's answer, whole or streamed: choices for each prompt, numbered prompt by prompt."""

    def __init__(self, service: Service, form: Form, asked: CompletionRequest, jobs: Sequence[Job]) -> None:
        self._service = service
        self._asked = asked
        self._form = form
        self._jobs = jobs
        self._head = {"id": asked.base.rid, "created": int(time.time()), "model": service.model_name}

    def respond(self, body: OpenAIBody) -> Response:
        if not body.stream:
            return Answer(self._whole)
        options = body.stream_options or StreamOptions()
        return EventStream(lambda events: self._stream(events, usage=bool(options.include_usage)), tell_error)

    def hand_over(self, host: str) -> Response:
        """The answer of a prefill server, never a stream: the first token of each choice, and where held KV is found.
        host: under which the client has reached this server."""
        return Answer(lambda: self._handed_over(host))

    async def _whole(self) -> dict[str, Any]:
        return self._shown(await collect(self._service, self._jobs))

    async def _handed_over(self, host: str) -> dict[str, Any]:
        found = await hand_over(self._service, self._jobs)
        return self._shown(found) | held_params(self._service, host, self._asked.prompts, self._jobs, found)

    def _shown(self, found: Sequence[tuple[Choice, GenerationResult]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._form.name,
            "choices": [self._form.whole(index, choice, result) for index, (choice, result) in enumerate(found)],
            **self._totals([result for _, result in found]),
        }

    async def _stream(self, events: EventWriter, *, usage: bool) -> None:
        head = {**self._head, "object": self._form.chunk_name}
        so_far: dict[int, Choice] = {}

        async def open_choice(index: int) -> Choice:
            if index not in so_far:
                so_far[index] = Choice()
                if (opening := self._form.opening(index)) is not None:
                    await events.data({**head, "choices": [opening]})
            return so_far[index]

        async def emit(index: int, event: Progress | Delta) -> None:
            if isinstance(event, Progress):
                progress = {"choice": index, "phase": event.phase, "done": event.done, "total": event.total}
                await events.data({**head, "choices": [], "headrace": progress})
                return
            choice = await open_choice(index)
            if event.text or event.logprobs:
                await events.data({**head, "choices": [self._form.delta(index, event, choice)]})
            choice.take(event)

        async def ended(index: int, result: GenerationResult) -> None:
            await open_choice(index)
            await events.data({**head, "choices": [self._form.last(index, result.finish_reason)]})

        results = await run_choices(self._service, self._jobs, emit, ended)
        if usage:
            await events.data({**head, "choices": [], **self._totals(results)})
        await events.done()

    def _totals(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Usage over all choices; times and handoff of the first."""
        generated = sum(result.usage.completion_tokens for result in results)
        return {
            "usage": usage_report([result.usage for result in results[:: self._asked.choices]], generated),
            "headrace": headrace_report(results[0]),
        }


async def tell_error(events: EventWriter, info: ErrorInfo) -> None:
    """How a stream ends that has failed after its beginning."""
    await events.data(error_body(info))
    await events.done()
