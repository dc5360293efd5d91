"""JSON of the choices of a chat whose answers are read for reasoning and tool calls."""

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
from headrace.server.api.request.reasoning import AnswerUse
from headrace.server.api.response.choices import Choice
from headrace.server.api.response.usage import MORE
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls.call_form import new_call_id
from headrace.text.tool_calls.char_reader import CallPart, Found


class AnswerForm:
    """POST /v1/chat/completions: a ChatForm whose text has reasoning and calls taken out of it."""

    name = ChatForm.name
    reply = ChatForm.reply
    chunk_name = ChatForm.chunk_name
    chunk = ChatForm.chunk

    def __init__(self, tokenizer: Tokenizer, answers: AnswerUse, *, logprobs: bool) -> None:
        self._chat = ChatForm(tokenizer, logprobs=logprobs)
        self._answers = answers
        self._parsers: dict[int, AnswerParser] = {}  # by choice
        self._calling: set[int] = set()  # choices that have called
        self.reasoning_tokens: int | None = None if answers.reasoning is None else 0
        """Of all choices that have ended."""

    def opening(self, index: int) -> ChatChunkChoice:
        """A chunk with the role."""
        return self._chat.opening(index)

    def delta(self, index: int, delta: GenerationDelta) -> ChatChunkChoice | None:
        """A chunk with reasoning, content or parts of calls; None while it is not certain what the text will be."""
        fields = self._fields(index, self._parser(index).push(delta.text))
        if fields == ChatDelta() and not delta.logprobs:
            return None
        return msgspec.structs.replace(self._chat.delta(index, delta), delta=fields)

    def last(self, index: int, choice: Choice, result: GenerationResult) -> ChatChunkChoice:
        """A chunk with the finish reason, and what was held back."""
        fields = self._fields(index, self._parser(index).flush())
        self._count(index, choice)
        reason = self._reason(index, result.finish_reason)
        return msgspec.structs.replace(self._chat.last(index, choice, result), delta=fields, finish_reason=reason)

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> ChatChoice:
        """A choice with "message", which has the reasoning and the calls."""
        fields = self._fields(index, self._parser(index).whole(choice.text))
        self._count(index, choice)
        whole = self._chat.whole(index, choice, result)
        message = whole.message
        called = fields.tool_calls is not MORE
        if called:
            message.tool_calls = [msgspec.structs.replace(call, index=MORE) for call in fields.tool_calls]
        message.content = (None if called else "") if fields.content is MORE else fields.content
        message.reasoning = message.reasoning_content = fields.reasoning
        whole.finish_reason = self._reason(index, result.finish_reason)
        return whole

    def _parser(self, index: int) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = self._answers.parser()
        return self._parsers[index]

    def _count(self, index: int, choice: Choice) -> None:
        if self.reasoning_tokens is not None:
            self.reasoning_tokens += self._parser(index).reasoning_tokens(choice.offsets)

    def _fields(self, index: int, found: Found) -> ChatDelta:
        """The "delta" of what was found in a text."""
        if found.calls:
            self._calling.add(index)
        reasoning = (found.reasoning if self._answers.included else "") or MORE
        return ChatDelta(
            content=found.content or MORE,
            tool_calls=[self._part(part) for part in found.calls] or MORE,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _part(self, part: CallPart) -> ToolCallReply:
        if part.name is None:
            return ToolCallReply(index=part.call, function=CalledFunctionReply(arguments=part.arguments))
        assert self._answers.tools is not None, "there are calls"
        function = CalledFunctionReply(name=part.name, arguments=part.arguments)
        call_id = part.id or new_call_id(self._answers.tools.form)
        return ToolCallReply(index=part.call, id=call_id, type="function", function=function)

    def _reason(self, index: int, reason: FinishReason | None) -> str | None:
        return "tool_calls" if reason == "stop" and index in self._calling else reason
