"""Responses of POST /v1/responses: one text, or calls, in the form of OpenAI's newer API. Nothing is kept for later
requests."""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.openai.choice_forms import prompt_logprobs
from headrace.server.api.openai.replies import ResponseItem, ResponsesEvent, ResponsesReply, ResponseStatus
from headrace.server.api.openai.response_items import Event, OutputItems
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.sampling import refuse_fields
from headrace.server.api.request.schema import ResponsesBody
from headrace.server.api.response.choices import Choice, Output, positions
from headrace.server.api.response.usage import CachedTokens, cached_by_tier, headrace_report
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.streaming import EventWriter, made_aside


def refuse_unsupported_responses(body: ResponsesBody) -> None:
    """Raises HeadraceError (400) for more than one continuation and for progress, which this API has no form for."""
    options = body.stream_options
    progress = options is not None and bool(options.include_progress)
    refuse_fields({"n": body.n not in (None, 1), "stream_options.include_progress": progress})


class ResponsesFormat:
    """The ResponseFormat of a response with one message, or calls."""

    def __init__(self, body: ResponsesBody, completion: CompletionRequest, model: ServedModel) -> None:
        self._body = body
        self._model_name = model.called(completion.base.model)
        self._tokenizer = model.tokenizer
        self._sequence_numbers = itertools.count()
        self._items = OutputItems(completion.answers)
        self._id, self._created = completion.base.rid, int(wall_time())

    async def body(self, outputs: Sequence[Output]) -> ResponsesReply:
        """The finished response."""
        ((choice, result),) = outputs
        return await made_aside(partial(self._whole, choice, result), positions(choice, result))

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """This API has no such event."""

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """Deltas of text or arguments, after the events that open what they are of."""
        await self._write_items(events, self._items.push(delta.text))

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """The events that close the items and the response."""
        await self._write_items(events, self._items.finish(_status(result)))
        response = await made_aside(partial(self._finished, choice, result), positions(choice, result))
        await self._write(events, f"response.{response.status}", response=response)

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """The last event of a choice ends the stream."""

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """The error event of this API."""
        await self._write(events, "error", code=info.code, message=info.message, param=info.field)

    async def _write_items(self, events: EventWriter, items: Iterable[Event]) -> None:
        """Write events of items, the first of them after those that begin the response."""
        for kind, fields in items:
            if not events.started:
                response = self._response("in_progress", [])
                await self._write(events, "response.created", response=response)
                await self._write(events, "response.in_progress", response=response)
            await self._write(events, kind, **fields)

    async def _write(self, events: EventWriter, kind: str, **fields: Any) -> None:
        await events.data(ResponsesEvent(type=kind, sequence_number=next(self._sequence_numbers), **fields), kind)

    def _whole(self, choice: Choice, result: GenerationResult) -> ResponsesReply:
        for piece in choice.text if self._items.parsed else (choice.text,):  # as in a stream: items in that order
            list(self._items.push(piece))
        list(self._items.finish(_status(result)))
        return self._finished(choice, result)

    def _finished(self, choice: Choice, result: GenerationResult) -> ResponsesReply:
        status = _status(result)
        usage = result.usage
        return msgspec.structs.replace(
            self._response(status, self._items.output(status)),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": CachedTokens(usage.cached_tokens, cached_by_tier([usage])),
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._items.reasoning_tokens(choice.offsets)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            headrace=headrace_report(result),
            prompt_logprobs=prompt_logprobs(self._tokenizer, result),
        )

    def _response(self, status: ResponseStatus, output: list[ResponseItem]) -> ResponsesReply:
        """With the fields that clients of this API always expect."""
        return ResponsesReply(
            id=self._id,
            object="response",
            created_at=self._created,
            model=self._model_name,
            status=status,
            output=output,
            error=None,
            incomplete_details=None,
            metadata={},
            **self._tool_settings(),
        )

    def _tool_settings(self) -> dict[str, Any]:
        body = self._body
        if not body.tools:
            return {"tools": [], "tool_choice": "none", "parallel_tool_calls": False}
        nothing = {"description": None, "parameters": None, "strict": None}
        return {
            "tools": [nothing | msgspec.structs.asdict(tool) for tool in body.tools],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        }


def _status(result: GenerationResult) -> ResponseStatus:
    return "incomplete" if result.finish_reason == "length" else "completed"
