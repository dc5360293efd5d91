"""Responses of the OpenAI routes as GET /openapi.json describes them: see replies.py."""

from typing import Any, Literal

import msgspec

from headrace.core.types.requests.request import FinishReason
from headrace.server.api.description.replies import MORE, Report, UsageReply
from headrace.text.logprobs import LogprobEntry


class CompletionLogprobs(msgspec.Struct):
    """Of the tokens of a choice, one entry each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    prompt_logprobs: list[LogprobEntry | None] = MORE


class CompletionReply(msgspec.Struct):
    """Of POST /v1/completions; so are the chunks of its streams, where usage comes last and if asked for."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageReply = MORE
    headrace: dict[str, Any] = MORE
    """Times and handoff of the first choice; progress in a stream with include_progress."""
    kv_transfer_params: dict[str, Any] = MORE
    """From a prefill server that holds the KV: what the decode server needs to fetch it."""


class ChatToken(msgspec.Struct):
    """A token and its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatToken):
    """A token of a message."""

    top_logprobs: list[ChatToken] = MORE


class ChatLogprobs(msgspec.Struct):
    """Of the tokens of a message."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunctionReply(msgspec.Struct):
    """A function and its arguments, JSON as text."""

    arguments: str
    name: str = MORE


class ToolCallReply(msgspec.Struct):
    """A call of a tool, or in a stream what is new of it."""

    function: CalledFunctionReply
    id: str = MORE
    type: Literal["function"] = MORE
    index: int = MORE
    """Which call this is part of, in a stream."""


class ChatAnswer(msgspec.Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = MORE
    tool_calls: list[ToolCallReply] = MORE


class ChatChoice(msgspec.Struct):
    """One continuation."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    prompt_logprobs: list[LogprobEntry | None] = MORE


class ChatReply(msgspec.Struct):
    """Of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageReply
    headrace: Report
    kv_transfer_params: dict[str, Any] = MORE
    """From a prefill server that holds the KV: what the decode server needs to fetch it."""


class ChatDelta(msgspec.Struct):
    """What is new in a message."""

    role: str = MORE
    content: str = MORE
    tool_calls: list[ToolCallReply] = MORE


class ChatChunkChoice(msgspec.Struct):
    """What is new in one continuation."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = MORE
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    logprobs: ChatLogprobs | None = MORE
    prompt_logprobs: list[LogprobEntry | None] = MORE


class ChatChunk(msgspec.Struct):
    """An event of a stream of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageReply = MORE
    headrace: dict[str, Any] = MORE


class ResponseText(msgspec.Struct):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class ResponseItem(msgspec.Struct):
    """An item of the output."""

    id: str
    type: str
    status: str
    role: str = MORE
    content: list[ResponseText] = MORE


class ResponsesReply(msgspec.Struct):
    """Of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[ResponseItem]
    incomplete_details: dict[str, str] | None
    error: None
    usage: dict[str, Any] = MORE
    headrace: Report = MORE
    prompt_logprobs: list[LogprobEntry | None] = MORE


class ResponsesEvent(msgspec.Struct):
    """An event of a stream of POST /v1/responses; further fields as its type has them."""

    type: str
    sequence_number: int
