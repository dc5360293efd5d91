"""Answers of POST /v1/responses: one text, in the form of OpenAI's newer API. Nothing is kept for later requests."""

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from headrace.core.messages.frontend import Progress
from headrace.core.types.errors import ErrorInfo, invalid
from headrace.server.api.request.completion import CompletionRequest
from headrace.server.api.request.schema import ChatMessage, OpenAIBody, ResponsesBody
from headrace.server.api.response.answer import Answer, EventStream, EventWriter
from headrace.server.api.response.choices import collect, run_choices
from headrace.server.api.response.handoff import hand_over, held_params
from headrace.server.api.response.usage import headrace_report
from headrace.server.frontend.generation import Delta, GenerationResult, Job
from headrace.server.frontend.service import Service


def refuse_unserved(body: ResponsesBody) -> None:
    """Raises HeadraceError (400) for what only this route knows, and would change the answer."""
    asked = {
        "previous_response_id": body.previous_response_id is not None,
        "conversation": body.conversation is not None,
        "background": bool(body.background),
        "n": body.n not in (None, 1),
        "top_logprobs": bool(body.top_logprobs),
        "text": body.text is not None and body.text.get("format", {"type": "text"}) != {"type": "text"},
    }
    for field, given in asked.items():
        if given:
            raise invalid(field, f"{field} is not supported; leave it out", code="unsupported")


def input_messages(body: ResponsesBody) -> Sequence[ChatMessage]:
    """The conversation. Raises HeadraceError (400) for items that are no messages."""
    if isinstance(body.input, str):
        return [ChatMessage("user", body.input)] if body.input else []
    for index, item in enumerate(body.input):
        if item.type != "message":
            message = f"input[{index}] is of type {item.type!r}; only messages are supported"
            raise invalid(f"input[{index}]", message, code="unsupported")
    return body.input


class ResponsesAnswer:
    """One request's answer, whole or as events."""

    def __init__(self, service: Service, asked: CompletionRequest, jobs: Sequence[Job]) -> None:
        self._service = service
        self._asked = asked
        self._jobs = jobs
        self._numbers = itertools.count()  # of events
        self._message = f"msg_{secrets.token_hex(16)}"
        self._head = {"id": asked.base.rid, "object": "response", "created_at": int(time.time())}

    def respond(self, body: OpenAIBody) -> Response:
        return EventStream(self._stream, self._tell) if body.stream else Answer(self._whole)

    def hand_over(self, host: str) -> Response:
        """The answer of a prefill server, never a stream. host: under which the client has reached this server."""
        return Answer(lambda: self._handed_over(host))

    async def _whole(self) -> dict[str, Any]:
        ((choice, result),) = await collect(self._service, self._jobs)
        return self._ended(choice.text, result)

    async def _handed_over(self, host: str) -> dict[str, Any]:
        found = await hand_over(self._service, self._jobs)
        ((choice, result),) = found
        held = held_params(self._service, host, self._asked.prompts, self._jobs, found)
        return self._ended(choice.text, result) | held

    async def _stream(self, events: EventWriter) -> None:
        about = {"item_id": self._message, "output_index": 0, "content_index": 0}
        text = ""

        async def say(kind: str, **fields: Any) -> None:
            await self._say(events, kind, **fields)

        async def open_item() -> None:
            response = self._response("in_progress", [])
            await say("response.created", response=response)
            await say("response.in_progress", response=response)
            await say("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            await say("response.content_part.added", **about, part=_part(""))

        async def emit(_index: int, event: Progress | Delta) -> None:
            nonlocal text
            if isinstance(event, Delta) and event.text:
                if not events.started:
                    await open_item()
                text += event.text
                await say("response.output_text.delta", **about, delta=event.text, logprobs=[])

        async def ended(_index: int, result: GenerationResult) -> None:
            if not events.started:
                await open_item()
            response = self._ended(text, result)
            await say("response.output_text.done", **about, text=text, logprobs=[])
            await say("response.content_part.done", **about, part=_part(text))
            await say("response.output_item.done", output_index=0, item=response["output"][0])
            await say(f"response.{response['status']}", response=response)

        await run_choices(self._service, self._jobs, emit, ended)

    async def _say(self, events: EventWriter, kind: str, **fields: Any) -> None:
        await events.data({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    async def _tell(self, events: EventWriter, info: ErrorInfo) -> None:
        """How a stream ends that has failed after its beginning."""
        await self._say(events, "error", code=info.code, message=info.message, param=info.field)

    def _ended(self, text: str, result: GenerationResult) -> dict[str, Any]:
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
        """With the fields that clients of this API expect whatever was asked."""
        nothing: dict[str, Any] = {"error": None, "incomplete_details": None, "metadata": {}, "tools": []}
        settings = {"tool_choice": "none", "parallel_tool_calls": False}
        about = {"model": self._service.model_name, "status": status, "output": output}
        return {**self._head, **about, **nothing, **settings}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
