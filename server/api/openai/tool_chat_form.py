"""JSON of the choices of a chat that may call tools."""

from collections.abc import Sequence
from typing import Any

from headrace.core.types.requests.request import FinishReason
from headrace.server.api.openai.choice_forms import ChatForm
from headrace.server.api.request.tools import ToolUse
from headrace.server.api.response.choices import Choice
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls.call_form import CallForm, new_call_id
from headrace.text.tool_calls.call_parser import ToolCallParser
from headrace.text.tool_calls.char_reader import CallPart


class ToolChatForm:
    """POST /v1/chat/completions with tools: a ChatForm whose text has the calls taken out of it."""

    name = ChatForm.name
    chunk_name = ChatForm.chunk_name

    def __init__(self, tokenizer: Tokenizer, tools: ToolUse, *, logprobs: bool) -> None:
        self._chat = ChatForm(tokenizer, logprobs=logprobs)
        self._tools = tools
        self._parsers: dict[int, ToolCallParser] = {}  # by choice
        self._calling: set[int] = set()  # choices that have called

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk with the role."""
        return self._chat.opening(index)

    def delta(self, index: int, delta: GenerationDelta) -> dict[str, Any] | None:
        """A chunk with content or parts of calls; None while it is not certain what the text will be."""
        found = self._parser(index).push(delta.text)
        fields = self._fields(index, *found)
        return {**self._chat.delta(index, delta), "delta": fields} if fields or delta.logprobs else None

    def last(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A chunk with the finish reason, and what was held back."""
        fields = self._fields(index, *self._parser(index).flush())
        reason = self._reason(index, result.finish_reason)
        return {**self._chat.last(index, choice, result), "delta": fields, "finish_reason": reason}

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A choice with "message", which has the calls."""
        fields = self._fields(index, *self._parser(index).whole(choice.text))
        whole = self._chat.whole(index, choice, result)
        content = fields.get("content", None if "tool_calls" in fields else "")
        message = {**whole["message"], "content": content}
        if "tool_calls" in fields:
            calls: list[dict[str, Any]] = fields["tool_calls"]
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {**whole, "message": message, "finish_reason": self._reason(index, result.finish_reason)}

    def _parser(self, index: int) -> ToolCallParser:
        if index not in self._parsers:
            tools = self._tools
            self._parsers[index] = ToolCallParser(tools.form.format, tools.functions, parallel=tools.parallel)
        return self._parsers[index]

    def _fields(self, index: int, content: str, parts: Sequence[CallPart]) -> dict[str, Any]:
        """The "delta" of what was found in a text."""
        fields: dict[str, Any] = {"content": content} if content else {}
        if parts:
            self._calling.add(index)
            fields["tool_calls"] = [_part(part, self._tools.form) for part in parts]
        return fields

    def _reason(self, index: int, reason: FinishReason | None) -> str | None:
        return "tool_calls" if reason == "stop" and index in self._calling else reason


def _part(part: CallPart, form: CallForm) -> dict[str, Any]:
    function = {"arguments": part.arguments}
    if part.name is None:
        return {"index": part.call, "function": function}
    named = {"name": part.name, **function}
    return {"index": part.call, "id": new_call_id(form), "type": "function", "function": named}
