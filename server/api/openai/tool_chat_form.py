"""JSON of the choices of a chat that may call tools."""

from collections.abc import Sequence

import msgspec

from headrace.core.types.requests.request import FinishReason
from headrace.server.api.openai.choice_forms import ChatForm
from headrace.server.api.openai.replies import (
    CalledFunctionReply,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ToolCallReply,
)
from headrace.server.api.request.tools import ToolUse
from headrace.server.api.response.choices import Choice
from headrace.server.api.response.usage import MORE
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls.call_form import CallForm, new_call_id
from headrace.text.tool_calls.call_parser import ToolCallParser
from headrace.text.tool_calls.char_reader import CallPart


class ToolChatForm:
    """POST /v1/chat/completions with tools: a ChatForm whose text has the calls taken out of it."""

    name = ChatForm.name
    reply = ChatForm.reply
    chunk_name = ChatForm.chunk_name
    chunk = ChatForm.chunk

    def __init__(self, tokenizer: Tokenizer, tools: ToolUse, *, logprobs: bool) -> None:
        self._chat = ChatForm(tokenizer, logprobs=logprobs)
        self._tools = tools
        self._parsers: dict[int, ToolCallParser] = {}  # by choice
        self._calling: set[int] = set()  # choices that have called

    def opening(self, index: int) -> ChatChunkChoice:
        """A chunk with the role."""
        return self._chat.opening(index)

    def delta(self, index: int, delta: GenerationDelta) -> ChatChunkChoice | None:
        """A chunk with content or parts of calls; None while it is not certain what the text will be."""
        found = self._parser(index).push(delta.text)
        fields = self._fields(index, *found)
        if fields == ChatDelta() and not delta.logprobs:
            return None
        return msgspec.structs.replace(self._chat.delta(index, delta), delta=fields)

    def last(self, index: int, choice: Choice, result: GenerationResult) -> ChatChunkChoice:
        """A chunk with the finish reason, and what was held back."""
        fields = self._fields(index, *self._parser(index).flush())
        reason = self._reason(index, result.finish_reason)
        return msgspec.structs.replace(self._chat.last(index, choice, result), delta=fields, finish_reason=reason)

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> ChatChoice:
        """A choice with "message", which has the calls."""
        fields = self._fields(index, *self._parser(index).whole(choice.text))
        whole = self._chat.whole(index, choice, result)
        called = fields.tool_calls is not MORE
        if called:
            whole.message.tool_calls = [msgspec.structs.replace(call, index=MORE) for call in fields.tool_calls]
        whole.message.content = (None if called else "") if fields.content is MORE else fields.content
        whole.finish_reason = self._reason(index, result.finish_reason)
        return whole

    def _parser(self, index: int) -> ToolCallParser:
        if index not in self._parsers:
            tools = self._tools
            self._parsers[index] = ToolCallParser(tools.form.format, tools.functions, parallel=tools.parallel)
        return self._parsers[index]

    def _fields(self, index: int, content: str, parts: Sequence[CallPart]) -> ChatDelta:
        """The "delta" of what was found in a text."""
        if parts:
            self._calling.add(index)
        calls = [_part(part, self._tools.form) for part in parts]
        return ChatDelta(content=content or MORE, tool_calls=calls or MORE)

    def _reason(self, index: int, reason: FinishReason | None) -> str | None:
        return "tool_calls" if reason == "stop" and index in self._calling else reason


def _part(part: CallPart, form: CallForm) -> ToolCallReply:
    if part.name is None:
        return ToolCallReply(index=part.call, function=CalledFunctionReply(arguments=part.arguments))
    function = CalledFunctionReply(name=part.name, arguments=part.arguments)
    return ToolCallReply(index=part.call, id=new_call_id(form), type="function", function=function)
