"""Responses as GET /openapi.json describes them. They are built elsewhere, and tests hold both together.

Fields may be added in later releases, so that these structs allow others.
"""

from typing import Annotated, Any, Literal

import msgspec

from headrace.core.types.kv.geometry import CacheShape
from headrace.core.types.requests.request import FinishReason
from headrace.text.logprobs import LogprobEntry, TopLogprob

MORE: Any = msgspec.UNSET  # default of a field that is there only if it was asked for, or applies
Count = Annotated[int, msgspec.Meta(ge=0)]


class Error(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    """One sentence for people."""
    type: str
    param: str | None
    """The field at fault."""
    code: str
    """Stable; programs may match on it."""
    stage: int = MORE
    """The pipeline stage that failed."""


class ErrorReply(msgspec.Struct):
    """Body of every response that is no success."""

    error: Error


class CachedTokens(msgspec.Struct):
    """Of a prompt."""

    cached_tokens: Count


class UsageReply(msgspec.Struct):
    """Tokens of all prompts and choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class Handoff(msgspec.Struct):
    """What was transferred."""

    pages: Count
    bytes: Count
    chunks: Count


class TimingMs(msgspec.Struct):
    """Milliseconds by phase."""

    queue: float
    bootstrap: float
    forward: float
    transfer: float
    total: float
    decode: float = MORE


class Report(msgspec.Struct):
    """Of the first choice."""

    timing_ms: TimingMs
    handoff: Handoff


class GenerateMeta(msgspec.Struct):
    """meta_info, as in SGLang."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    input_token_logprobs: list[list[Any]] = MORE
    output_token_logprobs: list[list[Any]] = MORE
    input_top_logprobs: list[Any] = MORE
    output_top_logprobs: list[Any] = MORE
    hidden_states: list[Any] = MORE
    """Of the prompt, followed by that of each generated token whose state was computed."""
    e2e_latency: float = MORE


class GenerateReply(msgspec.Struct):
    """One text of POST /generate. In a stream each event has all of the text so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int = MORE
    """Position of the text where a stream has several."""


class FirstToken(msgspec.Struct):
    """The token that follows the prompt."""

    id: int
    text: str
    logprob: float | None
    top_logprobs: list[TopLogprob] | None


class PrefillUsage(msgspec.Struct):
    """Tokens of the prompt."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class HiddenStatesReply(msgspec.Struct):
    """Of the prompt, from a position on: elements as computed, C-contiguous and little-endian in base64."""

    start: Count
    shape: list[int]
    dtype: str
    data: str


class DraftReply(msgspec.Struct):
    """The most likely first tokens."""

    top_ids: list[int]
    top_probs: list[float]


class PrefillReply(msgspec.Struct):
    """Of POST /v1/prefill, and the data of the event "done" of its stream."""

    rid: str
    ticket: str | None
    model: str
    first_token: FirstToken | None
    finish_reason: FinishReason | None
    usage: PrefillUsage
    timing_ms: TimingMs
    handoff: Handoff
    lease_s: float | None
    hidden_states: HiddenStatesReply | None
    draft: DraftReply | None
    prompt_logprobs: list[LogprobEntry | None] | None


class PrefillProgress(msgspec.Struct):
    """An event of POST /v1/prefill before "done": bootstrapped, progress or transferring."""

    rid: str
    done: Count
    total: Count


class Cancelled(msgspec.Struct):
    """Of DELETE /v1/prefill/{rid}."""

    cancelled: Literal[True]


class TokenizeReply(msgspec.Struct):
    """Of POST /tokenize."""

    tokens: list[int]
    count: Count
    max_model_len: int


class DetokenizeReply(msgspec.Struct):
    """Of POST /detokenize."""

    prompt: str


class ServedModelEntry(msgspec.Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelsReply(msgspec.Struct):
    """Of GET /v1/models."""

    object: Literal["list"]
    data: list[ServedModelEntry]


class StatusReply(msgspec.Struct):
    """Of probes."""

    status: Literal["ok", "ready"]


class VersionReply(msgspec.Struct):
    """Of GET /version."""

    version: str


class LoadReply(msgspec.Struct):
    """Of a data-parallel rank, as SGLang's GET /get_load has it."""

    dp_rank: int
    num_reqs: Count
    num_waiting_reqs: Count
    num_tokens: Count


class ServerInfoReply(msgspec.Struct):
    """Of GET /server_info."""

    model_path: str
    model_id: str
    served_model_name: str
    version: str
    instance_id: str
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int | None
    tp_size: int
    dp_size: int
    pp_size: int
    kv_block_size: int
    page_size: int
    max_model_len: int
    max_total_num_tokens: int


class ModelInfoReply(msgspec.Struct):
    """Of GET /model_info."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_model_len: int


class HandoffReply(msgspec.Struct):
    """Of GET /v1/handoff: where decode servers find this prefill server."""

    protocol: list[int]
    instance: str
    control_port: int
    bootstrap_port: int
    model: str
    fingerprint: str | None
    page_size: int
    kv_cache: CacheShape | None
    structured_outputs: bool
    penalties: bool
    hidden_states: bool
    prompt_logprobs_start: bool
    kv_events: dict[str, Any] | None
    load: dict[str, float] | None
