"""Usage, times and handoff statistics in responses. Fields may be added in later releases; clients allow others."""

from typing import Annotated, Any

import msgspec

from headrace.core.types.kv.kv_tiers import TIERS
from headrace.core.types.requests.kv_hints import HintAnswer
from headrace.core.types.requests.request import Timing, Usage
from headrace.server.frontend.request.generation_request import GenerationResult

MORE: Any = msgspec.UNSET  # default of a field that is there only if it was asked for, or applies
Count = Annotated[int, msgspec.Meta(ge=0)]


class CachedByTier(msgspec.Struct):
    """Cached tokens by where their KV was: in the pool, or in a tier that it was loaded from."""

    device: Count
    host: Count
    disk: Count
    library: Count = MORE
    """Where some were loaded from KV files."""


class CachedTokens(msgspec.Struct):
    """Of a prompt."""

    cached_tokens: Count
    cached_tokens_details: CachedByTier = MORE
    """Where some were loaded from a tier."""


class CompletionTokens(msgspec.Struct):
    """Of all choices."""

    reasoning_tokens: Count


class UsageReply(msgspec.Struct):
    """Tokens of all prompts and choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens = MORE
    """Where reasoning is told from other text."""


class Handoff(msgspec.Struct):
    """What was transferred."""

    pages: Count
    bytes: Count
    chunks: Count


class TimingMs(msgspec.Struct, kw_only=True):
    """Milliseconds by phase."""

    queue: float
    bootstrap: float
    forward: float
    transfer: float
    decode: float = MORE
    total: float


class Report(msgspec.Struct):
    """Of the first choice."""

    timing_ms: TimingMs
    handoff: Handoff
    kv_hints: tuple[HintAnswer, ...] = MORE
    """What was granted of the request's KV hints, where it had any."""


def usage_report(usages: list[Usage], completion_tokens: int, reasoning_tokens: int | None = None) -> UsageReply:
    """OpenAI's "usage" object. usages: one for each prompt."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    cached = CachedTokens(sum(usage.cached_tokens for usage in usages), cached_by_tier(usages))
    details = MORE if reasoning_tokens is None else CompletionTokens(reasoning_tokens)
    return UsageReply(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, details)


def cached_by_tier(usages: list[Usage]) -> CachedByTier:
    """UNSET where nothing was loaded from a tier. usages: one for each prompt."""
    host, disk, library = (sum(getattr(usage.from_tiers, tier) for usage in usages) for tier in TIERS)
    cached = sum(usage.cached_tokens for usage in usages)
    loaded = host + disk + library
    return CachedByTier(cached - loaded, host, disk, library or MORE) if loaded else MORE


def timing_report(timing: Timing, *, decode: bool) -> TimingMs:
    """Milliseconds by phase; total is the sum of the rounded values. decode: include the time after the first token."""
    phases = {
        "queue": timing.queue_s,
        "bootstrap": timing.bootstrap_s,
        "forward": timing.forward_s,
        "transfer": timing.transfer_s,
    }
    if decode:
        phases["decode"] = timing.decode_s
    report = {name: round(1000 * seconds, 3) for name, seconds in phases.items()}
    return TimingMs(**report, total=round(sum(report.values()), 3))


def handoff_report(result: GenerationResult) -> Handoff:
    """Pages, bytes and chunks that were transferred."""
    return Handoff(result.handoff.pages, result.handoff.bytes, result.handoff.chunks)


def headrace_report(result: GenerationResult) -> Report:
    """The "headrace" object of OpenAI responses: times and handoff of the first choice."""
    return Report(timing_report(result.timing, decode=True), handoff_report(result), result.hints or MORE)
