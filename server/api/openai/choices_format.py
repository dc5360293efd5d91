"""Responses of OpenAI's completions and chat completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.openai.choice_forms import ChoiceForm
from headrace.server.api.openai.echo import without_completion
from headrace.server.api.openai.replies import ChoicesReply
from headrace.server.api.openai.token_ids import ReturnedTokenIds
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.schema import StreamOptions
from headrace.server.api.response.choices import Choice, Output, best_outputs, positions
from headrace.server.api.response.usage import headrace_report, progress_report, usage_report
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.server.http.error_response import write_error_event
from headrace.server.http.streaming import EventWriter, made_aside


class ChoicesFormat:
    """The ResponseFormat with "choices", numbered prompt by prompt."""

    def __init__(
        self,
        completion: CompletionRequest,
        model_name: str,
        form: ChoiceForm,
        options: StreamOptions | None,
        ids: ReturnedTokenIds | None = None,
    ) -> None:
        self._choices_per_prompt = completion.choices
        self._best = completion.returned
        self._prompt_only = completion.base.prompt_only
        self._form = form
        self._include_usage = options is not None and bool(options.include_usage)
        self._head: dict[str, Any] = {"id": completion.base.rid, "created": int(wall_time()), "model": model_name}
        self._chunk = form.chunk(**self._head, object=form.chunk_name, choices=[])
        self._opened: set[int] = set()
        self._ids = ids

    async def body(self, outputs: Sequence[Output]) -> ChoicesReply:
        """All choices, or the best of each prompt, with usage and the "headrace" report of all."""
        if self._prompt_only:
            outputs = [without_completion(output) for output in outputs]
        best = best_outputs(outputs, self._choices_per_prompt, self._best)
        choices = [
            await made_aside(partial(self._form.whole, index, *output), positions(*output))
            for index, output in enumerate(best)
        ]
        totals = self._totals([result for _, result in outputs])
        reply = self._form.reply(**self._head, object=self._form.name, choices=choices, **totals)
        if self._ids is not None:
            self._ids.into_reply(reply, [choice for choice, _ in best])
        return reply

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """A chunk without choices and with the progress under "headrace"."""
        await self._write_chunk(events, [], headrace=progress_report(index, progress))

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """A chunk of one choice."""
        if self._ids is not None:
            self._ids.generated(index, delta)
        await self._open(events, index)
        told = delta.text or delta.logprobs or (self._ids is not None and self._ids.waiting(index))
        if told and (chunk := self._form.delta(index, delta)) is not None:
            await self._write_choice(events, index, chunk)

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """A chunk with the finish reason."""
        await self._open(events, index)
        last = await made_aside(partial(self._form.last, index, choice, result), positions(choice, result))
        await self._write_choice(events, index, last)

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """A chunk of usage if requested, and [DONE]."""
        if self._include_usage:
            await self._write_chunk(events, [], **self._totals(results))
        await events.done()

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """The error, and [DONE]."""
        await write_error_event(events, info)

    async def _open(self, events: EventWriter, index: int) -> None:
        if index in self._opened:
            return
        self._opened.add(index)
        if (opening := self._form.opening(index)) is not None:
            await self._write_choice(events, index, opening)

    async def _write_choice(self, events: EventWriter, index: int, choice: Any) -> None:
        """A chunk of one choice."""
        chunk = msgspec.structs.replace(self._chunk, choices=[choice])
        if self._ids is not None:
            self._ids.into_chunk(chunk, index)
        await events.data(chunk)

    async def _write_chunk(self, events: EventWriter, choices: list[Any], **more: Any) -> None:
        await events.data(msgspec.structs.replace(self._chunk, choices=choices, **more))

    def _totals(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Usage of all choices; times and handoff of the first."""
        generated = sum(result.usage.completion_tokens for result in results)
        return {
            "usage": usage_report(
                [result.usage for result in results[:: self._choices_per_prompt]],
                generated,
                self._form.reasoning_tokens,
            ),
            "headrace": headrace_report(results[0]),
        }
