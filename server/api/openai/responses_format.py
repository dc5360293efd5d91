"""Responses of POST /v1/responses: one text in the form of OpenAI's newer API. Nothing is kept for later requests."""

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

from headrace.core.messages.frontend import Progress
from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo, invalid, shown
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.sampling import refuse_fields
from headrace.server.api.request.schema import ChatMessage, ResponsesBody
from headrace.server.api.response.choices import Choice, Output
from headrace.server.api.response.streaming import EventWriter
from headrace.server.api.response.usage import headrace_report
from headrace.server.frontend.generation_request import GenerationDelta, GenerationResult


def refuse_unsupported_responses(body: ResponsesBody) -> None:
    """Raises HeadraceError (400) for more than one continuation, which this API has no form for."""
    refuse_fields({"n": body.n not in (None, 1)})


def input_messages(body: ResponsesBody) -> Sequence[ChatMessage]:
    """The input as a conversation. Raises HeadraceError (400) for items other than messages."""
    if isinstance(body.input, str):
        return [ChatMessage("user", body.input)] if body.input else []
    for index, item in enumerate(body.input):
        if item.type != "message":
            message = f"input[{index}] is of type {shown(item.type)!r}; only messages are supported"
            raise invalid(f"input[{index}]", message, code="unsupported")
    return [ChatMessage(item.role, item.content, item.name) for item in body.input]


class ResponsesFormat:
    """The ResponseFormat of a response with one message."""

    def __init__(self, completion: CompletionRequest, model_name: str) -> None:
        self._model_name = model_name
        self._sequence_numbers = itertools.count()
        self._message_id = f"msg_{secrets.token_hex(16)}"
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._head = {"id": completion.base.rid, "object": "response", "created_at": int(wall_time())}

    async def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The finished response."""
        ((choice, result),) = outputs
        return self._finished(choice.text, result)

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """This API has no such event."""

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """response.output_text.delta, after the events that open the message."""
        if delta.text:
            await self._open(events)
            await self._write(events, "response.output_text.delta", **self._place, delta=delta.text, logprobs=[])

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """The events that close the message and the response."""
        await self._open(events)
        response = self._finished(choice.text, result)
        await self._write(events, "response.output_text.done", **self._place, text=choice.text, logprobs=[])
        await self._write(events, "response.content_part.done", **self._place, part=_part(choice.text))
        await self._write(events, "response.output_item.done", output_index=0, item=response["output"][0])
        await self._write(events, f"response.{response['status']}", response=response)

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """The last event of a choice ends the stream."""

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """The error event of this API."""
        await self._write(events, "error", code=info.code, message=info.message, param=info.field)

    async def _open(self, events: EventWriter) -> None:
        """Write the events before the first text."""
        if events.started:
            return
        response = self._response("in_progress", [])
        await self._write(events, "response.created", response=response)
        await self._write(events, "response.in_progress", response=response)
        await self._write(events, "response.output_item.added", output_index=0, item=self._item("in_progress", []))
        await self._write(events, "response.content_part.added", **self._place, part=_part(""))

    async def _write(self, events: EventWriter, kind: str, **fields: Any) -> None:
        await events.data({"type": kind, "sequence_number": next(self._sequence_numbers), **fields}, kind)

    def _finished(self, text: str, result: GenerationResult) -> dict[str, Any]:
        status = "incomplete" if result.finish_reason == "length" else "completed"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = result.usage
        return self._response(status, [self._item(status, [_part(text)])]) | {
            "incomplete_details": why,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            "headrace": headrace_report(result),
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """With the fields that clients of this API always expect."""
        nothing: dict[str, Any] = {"error": None, "incomplete_details": None, "metadata": {}, "tools": []}
        settings = {"tool_choice": "none", "parallel_tool_calls": False}
        about = {"model": self._model_name, "status": status, "output": output}
        return {**self._head, **about, **nothing, **settings}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
