"""Responses of the OpenAI routes: the structs that are sent, and that GET /openapi.json describes."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headrace.core.types.requests.request import FinishReason
from headrace.server.api.response.usage import MORE, Report, UsageReply
from headrace.text.logprobs import ChatLogprobs, CompletionLogprobs, LogprobEntry

ResponseStatus = Literal["in_progress", "completed", "incomplete"]


class ChoicesReply(msgspec.Struct, kw_only=True):
    """What responses with "choices" and their chunks have in common."""

    id: str
    created: int
    model: str
    object: Any
    choices: list[Any]
    usage: UsageReply = MORE
    headrace: Any = MORE
    kv_transfer_params: dict[str, Any] = MORE
    """From a prefill server that holds the KV: what the decode server needs to fetch it."""


class CompletionChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[LogprobEntry | None] = MORE
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    token_ids: list[int] = MORE
    """With return_token_ids: that were generated; in a stream, since the last chunk of this choice."""
    prompt_token_ids: Sequence[int] = MORE
    """With return_token_ids, of the prompt; in the first chunk of a stream."""


class CompletionReply(ChoicesReply, kw_only=True):
    """Of POST /v1/completions; so are the chunks of its streams, where usage comes last and if asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    headrace: dict[str, Any] = MORE
    """Times and handoff of the first choice; progress in a stream with include_progress."""


class OpenReport(msgspec.Struct):
    """Tokens of an open prompt."""

    tokens: int
    stable: int
    """Those that are not expected to change by what is appended."""
    computed: int
    expires_s: float
    """Seconds after which it expires unless it changes."""


class OpenReply(msgspec.Struct, kw_only=True):
    """To a body with headrace.open: the id under which the prompt is appended to and committed."""

    id: str
    object: Literal["open_prompt"]
    created: int
    model: str
    choices: list[Any]
    """Empty."""
    headrace: OpenReport


class CalledFunctionReply(msgspec.Struct, kw_only=True):
    """A function and its arguments, JSON as text."""

    name: str = MORE
    arguments: str


class ToolCallReply(msgspec.Struct, kw_only=True):
    """A call of a tool, or in a stream what is new of it."""

    index: int = MORE
    """Which call this is part of, in a stream."""
    id: str = MORE
    type: Literal["function"] = MORE
    function: CalledFunctionReply


class ChatAnswer(msgspec.Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCallReply] = MORE
    reasoning: str = MORE
    """How the model came to its answer, if it tells."""
    reasoning_content: str = MORE
    """The same, by the name that it had first."""


class ChatChoice(msgspec.Struct):
    """One continuation."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[LogprobEntry | None] = MORE
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    token_ids: list[int] = MORE
    """With return_token_ids: that were generated."""


class ChatReply(ChoicesReply, kw_only=True):
    """Of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageReply
    headrace: Report
    prompt_token_ids: Sequence[int] = MORE
    """With return_token_ids."""


class ChatDelta(msgspec.Struct):
    """What is new in a message."""

    role: str = MORE
    content: str = MORE
    tool_calls: list[ToolCallReply] = MORE
    reasoning: str = MORE
    reasoning_content: str = MORE


class ChatChunkChoice(msgspec.Struct):
    """What is new in one continuation."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[LogprobEntry | None] = MORE
    stop_reason: int | str | None = MORE
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    token_ids: list[int] = MORE
    """With return_token_ids: that were generated since the last chunk of this choice."""


class ChatChunk(ChoicesReply, kw_only=True):
    """An event of a stream of POST /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    headrace: dict[str, Any] = MORE
    prompt_token_ids: Sequence[int] = MORE
    """With return_token_ids, in the first chunk."""


class ResponseText(msgspec.Struct, kw_only=True):
    """Text of a message, or of reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = MORE


class ResponseItem(msgspec.Struct):
    """An item of the output: reasoning, a message, or a call of a function."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: str
    role: Literal["assistant"] = MORE
    summary: list[Any] = MORE
    content: list[ResponseText] = MORE
    call_id: str = MORE
    name: str = MORE
    arguments: str = MORE


class ResponsesReply(msgspec.Struct):
    """Of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: ResponseStatus
    output: list[ResponseItem]
    error: None
    incomplete_details: dict[str, str] | None
    metadata: dict[str, str]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    usage: dict[str, Any] = MORE
    headrace: Report = MORE
    prompt_logprobs: list[LogprobEntry | None] = MORE
    kv_transfer_params: dict[str, Any] = MORE


class ResponsesEvent(msgspec.Struct):
    """An event of a stream of POST /v1/responses: beside its type and number it has the fields of that type."""

    type: str
    sequence_number: int
    response: ResponsesReply = MORE
    item_id: str = MORE
    output_index: int = MORE
    content_index: int = MORE
    item: ResponseItem = MORE
    part: ResponseText = MORE
    delta: str = MORE
    text: str = MORE
    logprobs: list[Any] = MORE
    name: str = MORE
    arguments: str = MORE
    code: str = MORE
    message: str = MORE
    param: str | None = MORE


class ServedModelEntry(msgspec.Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """What --model names, or the folder of an adapter."""
    parent: str | None
    """Of an adapter: the model."""
    max_model_len: int


class ModelsReply(msgspec.Struct):
    """Of GET /v1/models."""

    object: Literal["list"]
    data: list[ServedModelEntry]
