"""JSON of the choices of OpenAI's text completions and chat completions."""

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.core.types.requests.request import TokenLogprob
from headrace.server.api.openai.echo import Echo
from headrace.server.api.openai.replies import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatReply,
    ChoicesReply,
    CompletionChoice,
    CompletionReply,
)
from headrace.server.api.response.choices import Choice
from headrace.server.api.response.usage import MORE
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.text.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
    native_entries,
    text_offsets,
)
from headrace.text.tokenizer import Tokenizer


class ChoiceForm(Protocol):
    """Builds the items of "choices", of a whole response and of the chunks of a stream."""

    name: str
    """The "object" of a whole response."""
    reply: type[ChoicesReply]
    chunk_name: str
    """The "object" of a chunk."""
    chunk: type[ChoicesReply]
    reasoning_tokens: int | None
    """Of all choices that have ended; None where reasoning is not told from other text."""

    def opening(self, index: int) -> CompletionChoice | ChatChunkChoice | None:
        """The chunk that begins a choice; None if there is none."""
        ...

    def delta(self, index: int, delta: GenerationDelta) -> CompletionChoice | ChatChunkChoice | None:
        """The chunk of new text; None if there is nothing to say yet."""
        ...

    def last(self, index: int, choice: Choice, result: GenerationResult) -> CompletionChoice | ChatChunkChoice:
        """The chunk that ends a choice, and has "prompt_logprobs" if requested."""
        ...

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> CompletionChoice | ChatChoice:
        """A choice of a whole response."""
        ...


class CompletionForm:
    """POST /v1/completions. echo: the prompts, if they are to come before their texts. Logprobs are those of the whole
    text and of the token that ended it, so that there is one for each of the completion tokens."""

    name = chunk_name = "text_completion"
    reply: type[ChoicesReply] = CompletionReply
    chunk: type[ChoicesReply] = CompletionReply
    reasoning_tokens: int | None = None

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool, echo: Echo | None = None) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echo = echo

    def opening(self, index: int) -> CompletionChoice | None:
        """A chunk with the prompt, if it is echoed."""
        return None if self._echo is None else CompletionChoice(index, self._echo.text(index))

    def delta(self, index: int, delta: GenerationDelta) -> CompletionChoice:
        """A chunk with "text"."""
        return CompletionChoice(index, delta.text, self._logprobs_object(delta.logprobs, delta.offsets))

    def last(self, index: int, choice: Choice, result: GenerationResult) -> CompletionChoice:
        """A chunk with the finish reason."""
        ended = self._logprobs_object(choice.end_logprobs, choice.end_offsets) if choice.end_logprobs else None
        prompt = prompt_logprobs(self._tokenizer, result)
        return CompletionChoice(index, "", ended, result.finish_reason, prompt, result.stop_reason)

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> CompletionChoice:
        """A choice with "text", and "prompt_logprobs" if requested and not part of an echo."""
        values, offsets = (*choice.logprobs, *choice.end_logprobs), (*choice.offsets, *choice.end_offsets)
        text, prompt = "", []
        if self._echo is not None:
            text, prompt = self._echo.text(index), self._echo.logprobs(index, result)
        logprobs = self._logprobs_object(values, [len(text) + offset for offset in offsets], prompt)
        text += choice.text
        more = MORE if self._echo and self._logprobs else prompt_logprobs(self._tokenizer, result)
        return CompletionChoice(index, text, logprobs, result.finish_reason, more, result.stop_reason)

    def _logprobs_object(
        self,
        values: Sequence[TokenLogprob],
        offsets: Sequence[int],
        prompt: Sequence[tuple[int, TokenLogprob | None]] = (),
    ) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        before = text_offsets(self._tokenizer, [token for token, _ in prompt])
        tokens = [*prompt, *((value.token, value) for value in values)]
        return completion_logprobs(self._tokenizer, tokens, [*before, *offsets])


class ChatForm:
    """POST /v1/chat/completions."""

    name = "chat.completion"
    reply: type[ChoicesReply] = ChatReply
    chunk_name = "chat.completion.chunk"
    chunk: type[ChoicesReply] = ChatChunk
    reasoning_tokens: int | None = None

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> ChatChunkChoice:
        """A chunk with the role."""
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))

    def delta(self, index: int, delta: GenerationDelta) -> ChatChunkChoice:
        """A chunk with "delta"."""
        return ChatChunkChoice(index, ChatDelta(content=delta.text), self._logprobs_object(delta.logprobs))

    def last(self, index: int, choice: Choice, result: GenerationResult) -> ChatChunkChoice:
        """A chunk with the finish reason."""
        prompt = prompt_logprobs(self._tokenizer, result)
        return ChatChunkChoice(index, ChatDelta(), None, result.finish_reason, prompt, result.stop_reason)

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> ChatChoice:
        """A choice with "message", and "prompt_logprobs" if requested."""
        message, logprobs = ChatAnswer("assistant", choice.text), self._logprobs_object(choice.logprobs)
        prompt = prompt_logprobs(self._tokenizer, result)
        return ChatChoice(index, message, logprobs, result.finish_reason, prompt, result.stop_reason)

    def _logprobs_object(self, values: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, values) if self._logprobs else None


def prompt_logprobs(tokenizer: Tokenizer, result: GenerationResult) -> Any:
    """UNSET unless they were requested: OpenAI has no such field."""
    return native_entries(tokenizer, result.prompt_logprobs) or MORE
