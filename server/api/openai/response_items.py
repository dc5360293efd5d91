"""The output of POST /v1/responses as it grows: reasoning, at most one message, and the calls in its text."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from headrace.server.api.openai.replies import ResponseItem, ResponseText
from headrace.server.api.request.reasoning import AnswerUse
from headrace.text.tool_calls.call_form import new_call_id
from headrace.text.tool_calls.char_reader import Found

Event = tuple[str, dict[str, Any]]  # kind and fields of an event of the stream


class OutputItems:
    """Items of one response."""

    def __init__(self, answers: AnswerUse) -> None:
        self._answers = answers
        self._parser = answers.parser()
        self._items: list[_Text | _Call] = []
        self._message: _Text | None = None
        self._reasoning: _Text | None = None
        self._calls: list[_Call] = []

    @property
    def parsed(self) -> bool:
        """Whether there may be more than one item."""
        return self._answers.parsed

    def push(self, text: str) -> Iterator[Event]:
        """Take more text; the events that tell of it."""
        yield from self._take(self._parser.push(text) if self.parsed else Found(text, []))

    def finish(self, status: str) -> Iterator[Event]:
        """The text has ended; the events that close all items. status: of the response."""
        yield from self._take(self._parser.flush())
        if not self._items:
            yield from self._open_message()
        for item in self._items:
            yield from item.close(status)

    def output(self, status: str) -> list[ResponseItem]:
        """The items of the finished response."""
        return [item.item(status) for item in self._items]

    def reasoning_tokens(self, offsets: Sequence[int]) -> int:
        """How many tokens of the finished response are reasoning. offsets: characters before each of them."""
        return self._parser.reasoning_tokens(offsets)

    def _take(self, found: Found) -> Iterator[Event]:
        if found.reasoning:
            if self._reasoning is None:
                self._reasoning = _Text(len(self._items), "reasoning")
                self._items.append(self._reasoning)
                yield from self._reasoning.open()
            yield self._reasoning.add(found.reasoning)
        if found.content:
            yield from self._thought()
            if self._message is None:
                yield from self._open_message()
            assert self._message is not None, "it has been opened"
            yield self._message.add(found.content)
        for part in found.calls:
            yield from self._thought()
            if part.name is not None:
                yield from self._open_call(part.name, part.id)
            if part.arguments:
                yield self._calls[part.call].add(part.arguments)

    def _thought(self) -> Iterator[Event]:
        """Something follows the reasoning."""
        if self._reasoning is not None:
            yield from self._reasoning.close("completed")
            self._reasoning = None

    def _open_message(self) -> Iterator[Event]:
        self._message = _Text(len(self._items), "message")
        self._items.append(self._message)
        yield from self._message.open()

    def _open_call(self, name: str, own_id: str) -> Iterator[Event]:
        assert self._answers.tools is not None, "there are calls"
        if self._calls:
            yield from self._calls[-1].close("completed")
        call = _Call(len(self._items), own_id or new_call_id(self._answers.tools.form), name)
        self._items.append(call)
        self._calls.append(call)
        yield call.open()


class _Text:
    """The text of a response, or a piece of its reasoning."""

    def __init__(self, index: int, kind: Literal["message", "reasoning"]) -> None:
        self._reasons = kind == "reasoning"
        self._id = f"{'rs' if self._reasons else 'msg'}_{secrets.token_hex(16)}"
        self._index = index
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._event = "response.reasoning_text" if self._reasons else "response.output_text"
        self._more: dict[str, Any] = {} if self._reasons else {"logprobs": []}
        self._pieces: list[str] = []
        self._status: str | None = None

    def open(self) -> Iterator[Event]:
        item = msgspec.structs.replace(self.item("in_progress"), content=[])
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        yield "response.content_part.added", {**self._place, "part": self._part("")}

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return f"{self._event}.delta", {**self._place, "delta": text, **self._more}

    def close(self, status: str) -> Iterator[Event]:
        if self._status is not None:
            return
        self._status = status
        text = "".join(self._pieces)
        yield f"{self._event}.done", {**self._place, "text": text, **self._more}
        yield "response.content_part.done", {**self._place, "part": self._part(text)}
        yield "response.output_item.done", {"output_index": self._index, "item": self.item(status)}

    def item(self, status: str) -> ResponseItem:
        content = [self._part("".join(self._pieces))]
        status = self._status or status
        if self._reasons:
            return ResponseItem(self._id, "reasoning", status, summary=[], content=content)
        return ResponseItem(self._id, "message", status, role="assistant", content=content)

    def _part(self, text: str) -> ResponseText:
        if self._reasons:
            return ResponseText(type="reasoning_text", text=text)
        return ResponseText(type="output_text", text=text, annotations=[])


class _Call:
    """One call."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._id, self._call_id, self._name = f"fc_{secrets.token_hex(16)}", call_id, name
        self._index = index
        self._place = {"item_id": self._id, "output_index": index}
        self._pieces: list[str] = []
        self._status = "in_progress"

    def open(self) -> Event:
        return "response.output_item.added", {"output_index": self._index, "item": self.item("")}

    def add(self, arguments: str) -> Event:
        self._pieces.append(arguments)
        return "response.function_call_arguments.delta", {**self._place, "delta": arguments}

    def close(self, status: str) -> Iterator[Event]:
        if self._status != "in_progress":
            return
        self._status = status
        item = self.item(status)
        done = {**self._place, "name": item.name, "arguments": item.arguments}
        yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def item(self, _status: str) -> ResponseItem:
        """Its status is its own: calls end before the text does."""
        arguments = "".join(self._pieces)
        return ResponseItem(
            self._id, "function_call", self._status, call_id=self._call_id, name=self._name, arguments=arguments
        )
