"""Request bodies as structs. Wrong types are refused while decoding; values are checked in sampling.py, prompts.py."""

from typing import Any

import msgspec

from headrace.server.upstream.handoff_params import HandoffParams, TransferParams


class Part(msgspec.Struct):
    """A part of a message's content; only texts can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """Sampling fields that all routes share; None means the default. cache_salt, extra_key (SGLang's name): requests
    share cached prefixes only with those that have the same of both."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    deadline_s: float | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    model: str | None = None
    stream: bool | None = None


class PrefillBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/prefill."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    logprobs: int | None = None
    ticket: str | None = None
    handoff: str | None = None
    rid: str | None = None


class StreamOptions(msgspec.Struct):
    """include_progress is ours: chunks without choices that tell how far the prefill is."""

    include_usage: bool | None = None
    include_progress: bool | None = None


class OpenAIBody(SamplingBody, kw_only=True):
    """What completions and chat share. From frequency_penalty to functions: known and not
    supported (see refuse_unsupported). The last four name a KV handoff (see handoff_params)."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    kv_transfer_params: TransferParams | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class InputItem(ChatMessage, kw_only=True):
    """One item of the input of POST /v1/responses; only messages can be served."""

    role: str = ""
    type: str = "message"


class ResponsesBody(OpenAIBody, kw_only=True):
    """POST /v1/responses. instructions: a system message before the input."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None


class GenerateSampling(msgspec.Struct, kw_only=True):
    """sampling_params of POST /generate."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateBody(HandoffParams, kw_only=True):
    """POST /generate. logprob_start_len: from 0 on, logprobs of the prompt are wanted, too (of all of it). cache_salt,
    extra_key: for all prompts, or one for each."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    rid: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    priority: int | None = None
    model: str | None = None
    stream: bool | None = None
