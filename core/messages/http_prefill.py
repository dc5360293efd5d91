"""Body of POST /v1/prefill, as clients of prefill servers write it: decode servers, gateways, integrations, tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.core.types.requests.kv_hints import KvHintsEnvelope
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.resume import Resume

PREFILL_PATH = "/v1/prefill"
PREFIXES_PATH = "/v1/prefixes"
RETURNS_PATH = "/v1/returns"
JSON_HEADERS = {"Content-Type": "application/json"}


class PrefillRequest(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt to compute, and how to choose its first token. A default leaves a field out: servers of other releases
    refuse fields that they do not know.

    What the fields mean, and their bounds, is said where a server reads them (PrefillBody).
    """

    rid: str | None = None
    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    images: Sequence[str] | None = None
    ticket: str | None = None
    handoff: Literal["hold", "none"] | None = None
    cached_only: bool | None = None
    open: bool | None = None
    stream: bool | None = None
    stop: Sequence[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: Mapping[str, float] = {}  # type: ignore[assignment]  # a JSON object, by token id
    structured_outputs: Mapping[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_hints: KvHintsEnvelope | None = None
    session_id: str | None = None
    adapter: str | None = None
    deadline_s: float | None = None
    slo_ttft_ms: float | None = None
    resume: Resume | None = None

    def encoded(self) -> bytes:
        """The body, to be sent with JSON_HEADERS."""
        return msgspec.json.encode(self)
