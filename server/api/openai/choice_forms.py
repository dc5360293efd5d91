"""JSON of the choices of OpenAI's text completions and chat completions."""

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.core.types.requests.request import FinishReason, TokenLogprob
from headrace.server.api.openai.echo import Echo
from headrace.server.api.response.choices import Choice
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.text.logprobs import chat_logprobs, completion_logprobs, native_entries, text_offsets
from headrace.text.tokenizer import Tokenizer


class ChoiceForm(Protocol):
    """Builds the items of "choices", of a whole response and of the chunks of a stream."""

    name: str
    """The "object" of a whole response."""
    chunk_name: str
    """The "object" of a chunk."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice; None if there is none."""
        ...

    def delta(self, index: int, delta: GenerationDelta) -> dict[str, Any] | None:
        """The chunk of new text; None if there is nothing to say yet."""
        ...

    def last(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """The chunk that ends a choice, and has "prompt_logprobs" if requested."""
        ...

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A choice of a whole response."""
        ...


class CompletionForm:
    """POST /v1/completions. echo: the prompts, if they are to come before their texts. Logprobs are those of the whole
    text and of the token that ended it, so that there is one for each of the completion tokens."""

    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool, echo: Echo | None = None) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echo = echo

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk with the prompt, if it is echoed."""
        return None if self._echo is None else _text_chunk(index, self._echo.text(index))

    def delta(self, index: int, delta: GenerationDelta) -> dict[str, Any]:
        """A chunk with "text"."""
        return _text_chunk(index, delta.text, self._logprobs_object(delta.logprobs, delta.offsets))

    def last(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A chunk with the finish reason."""
        ended = self._logprobs_object(choice.end_logprobs, choice.end_offsets) if choice.end_logprobs else None
        return {
            **_text_chunk(index, "", ended, result.finish_reason),
            **prompt_logprobs(self._tokenizer, result),
        }

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A choice with "text", and "prompt_logprobs" if requested and not part of an echo."""
        values, offsets = (*choice.logprobs, *choice.end_logprobs), (*choice.offsets, *choice.end_offsets)
        text, prompt = "", []
        if self._echo is not None:
            text, prompt = self._echo.text(index), self._echo.logprobs(index, result)
        logprobs = self._logprobs_object(values, [len(text) + offset for offset in offsets], prompt)
        text += choice.text
        more = {} if self._echo and self._logprobs else prompt_logprobs(self._tokenizer, result)
        return {**_text_chunk(index, text, logprobs, result.finish_reason), **more}

    def _logprobs_object(
        self,
        values: Sequence[TokenLogprob],
        offsets: Sequence[int],
        prompt: Sequence[tuple[int, TokenLogprob | None]] = (),
    ) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        before = text_offsets(self._tokenizer, [token for token, _ in prompt])
        tokens = [*prompt, *((value.token, value) for value in values)]
        return completion_logprobs(self._tokenizer, tokens, [*before, *offsets])


class ChatForm:
    """POST /v1/chat/completions."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk with the role."""
        message = {"role": "assistant", "content": ""}
        return {"index": index, "delta": message, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, delta: GenerationDelta) -> dict[str, Any]:
        """A chunk with "delta"."""
        content = {"content": delta.text}
        return {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs_object(delta.logprobs),
            "finish_reason": None,
        }

    def last(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A chunk with the finish reason."""
        ended = {"index": index, "delta": {}, "logprobs": None, "finish_reason": result.finish_reason}
        return {**ended, **prompt_logprobs(self._tokenizer, result)}

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """A choice with "message", and "prompt_logprobs" if requested."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs_object(choice.logprobs),
            "finish_reason": result.finish_reason,
            **prompt_logprobs(self._tokenizer, result),
        }

    def _logprobs_object(self, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, values) if self._logprobs else None


def _text_chunk(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: FinishReason | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def prompt_logprobs(tokenizer: Tokenizer, result: GenerationResult) -> dict[str, Any]:
    """Present only if they were requested: OpenAI has no such field."""
    entries = native_entries(tokenizer, result.prompt_logprobs)
    return {} if entries is None else {"prompt_logprobs": entries}
