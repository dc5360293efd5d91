"""Usage, times and handoff statistics in responses. Fields may be added in later releases; clients allow others."""

from typing import Annotated, Any

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.types.kv.kv_tiers import TIERS
from headrace.core.types.requests.kv_hints import HintAnswer
from headrace.core.types.requests.request import Promise, Timing, Usage
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


class PromiseReport(msgspec.Struct):
    """The promised time to first token, and the actual one."""

    ttft_bound_ms: float
    ttft_ms: float
    """From the admission, without the time that it waited for a peer."""
    kept: bool


class Report(msgspec.Struct):
    """Of the first choice."""

    timing_ms: TimingMs
    handoff: Handoff
    promise: PromiseReport = MORE
    """Where a time to first token was promised."""
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
    times = timing_report(result.timing, decode=True)
    return Report(times, handoff_report(result), promise_report(result.promise), result.hints or MORE)


def bound_ms(progress: Progress) -> float:
    """The promised time to first token; UNSET where nothing was promised."""
    found: float = MORE if progress.ttft_bound_s is None else round(1000 * progress.ttft_bound_s, 3)
    return found


def progress_report(index: int, progress: Progress) -> dict[str, object]:
    """The "headrace" object of an event that a choice's prefill has got further."""
    report = {"choice": index, "phase": progress.phase, "done": progress.done, "total": progress.total}
    return report if progress.ttft_bound_s is None else {**report, "ttft_bound_ms": bound_ms(progress)}


def promise_report(promise: Promise | None) -> PromiseReport:
    """UNSET where nothing was promised."""
    if promise is None:
        return MORE  # type: ignore[no-any-return]
    return PromiseReport(round(1000 * promise.bound_s, 3), round(1000 * promise.ttft_s, 3), promise.kept)
