"""The output of POST /v1/responses as it grows: at most one message, and the calls in its text."""

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.server.api.openai.replies import ResponseItem, ResponseText
from headrace.server.api.request.tools import ToolUse
from headrace.text.tool_calls.call_form import new_call_id
from headrace.text.tool_calls.call_parser import ToolCallParser
from headrace.text.tool_calls.char_reader import CallPart

Event = tuple[str, dict[str, Any]]  # kind and fields of an event of the stream


class OutputItems:
    """Items of one response. tools: None if nothing can be called; then there is a message alone."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._parser = ToolCallParser(tools.form.format, tools.functions, parallel=tools.parallel) if tools else None
        self._items: list[_Message | _Call] = []
        self._message: _Message | None = None
        self._calls: list[_Call] = []

    def push(self, text: str) -> Iterator[Event]:
        """Take more text; the events that tell of it."""
        yield from self._take(*(self._parser.push(text) if self._parser else (text, [])))

    def finish(self, status: str) -> Iterator[Event]:
        """The text has ended; the events that close all items. status: of the response."""
        if self._parser is not None:
            yield from self._take(*self._parser.flush())
        if not self._items:
            yield from self._open_message()
        for item in self._items:
            yield from item.close(status)

    def output(self, status: str) -> list[ResponseItem]:
        """The items of the finished response."""
        return [item.item(status) for item in self._items]

    def _take(self, content: str, parts: list[CallPart]) -> Iterator[Event]:
        if content:
            if self._message is None:
                yield from self._open_message()
            assert self._message is not None, "it has been opened"
            yield self._message.add(content)
        for part in parts:
            if part.name is not None:
                yield from self._open_call(part.name)
            if part.arguments:
                yield self._calls[part.call].add(part.arguments)

    def _open_message(self) -> Iterator[Event]:
        self._message = _Message(len(self._items))
        self._items.append(self._message)
        yield from self._message.open()

    def _open_call(self, name: str) -> Iterator[Event]:
        assert self._tools is not None, "there are calls"
        if self._calls:
            yield from self._calls[-1].close("completed")
        call = _Call(len(self._items), new_call_id(self._tools.form), name)
        self._items.append(call)
        self._calls.append(call)
        yield call.open()


class _Message:
    """The text of a response."""

    def __init__(self, index: int) -> None:
        self._id = f"msg_{secrets.token_hex(16)}"
        self._index = index
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._pieces: list[str] = []

    def open(self) -> Iterator[Event]:
        item = msgspec.structs.replace(self.item("in_progress"), content=[])
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        yield "response.content_part.added", {**self._place, "part": _part("")}

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return "response.output_text.delta", {**self._place, "delta": text, "logprobs": []}

    def close(self, status: str) -> Iterator[Event]:
        text = "".join(self._pieces)
        yield "response.output_text.done", {**self._place, "text": text, "logprobs": []}
        yield "response.content_part.done", {**self._place, "part": _part(text)}
        yield "response.output_item.done", {"output_index": self._index, "item": self.item(status)}

    def item(self, status: str) -> ResponseItem:
        content = [_part("".join(self._pieces))]
        return ResponseItem(self._id, "message", status, role="assistant", content=content)


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


def _part(text: str) -> ResponseText:
    return ResponseText(type="output_text", text=text, annotations=[])
