"""The two forms of OpenAI answers: text completions and chat."""

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.core.types.request import FinishReason, TokenLogprob
from headrace.server.api.response.choices import Choice
from headrace.server.frontend.generation import Delta, GenerationResult
from headrace.server.tokenizer.logprobs import chat_logprobs, completion_logprobs, native_entries
from headrace.server.tokenizer.tokenizer import Tokenizer


class Form(Protocol):
    """Builds the "choices" of an answer and of its chunks. before: what the choice had before this delta."""

    name: str
    chunk_name: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice, where there is one."""
        ...

    def delta(self, index: int, delta: Delta, before: Choice) -> dict[str, Any]: ...

    def last(self, index: int, reason: FinishReason | None) -> dict[str, Any]: ...

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]: ...


class CompletionForm:
    """POST /v1/completions."""

    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, delta: Delta, before: Choice) -> dict[str, Any]:
        logprobs = self._shown(delta.logprobs, len(before.text))
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._shown(choice.logprobs, 0),
            "finish_reason": result.finish_reason,
            **_prompt_logprobs(self._tokenizer, result),
        }

    def _shown(self, values: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        return completion_logprobs(self._tokenizer, values, offset) if self._logprobs else None


class ChatForm:
    """POST /v1/chat/completions."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        message = {"role": "assistant", "content": ""}
        return {"index": index, "delta": message, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, delta: Delta, before: Choice) -> dict[str, Any]:
        content = {"content": delta.text}
        return {"index": index, "delta": content, "logprobs": self._shown(delta.logprobs), "finish_reason": None}

    def last(self, index: int, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._shown(choice.logprobs),
            "finish_reason": result.finish_reason,
            **_prompt_logprobs(self._tokenizer, result),
        }

    def _shown(self, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, values) if self._logprobs else None


def _prompt_logprobs(tokenizer: Tokenizer, result: GenerationResult) -> dict[str, Any]:
    """Present only where they were asked for: OpenAI has no such field."""
    entries = native_entries(tokenizer, result.prompt_logprobs)
    return {} if entries is None else {"prompt_logprobs": entries}
