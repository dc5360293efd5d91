"""Figures of a measurement: latencies by percentile, throughput, goodput, failures by status."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from headrace.tools.bench.outcome import INTERRUPTED, BenchOutcome
from headrace.tools.bench.runner import Measured
from headrace.tools.output import quantile


class LatencyLimits(msgspec.Struct, frozen=True):
    """Service level objectives of a good request."""

    ttft_s: float | None
    tpot_s: float | None


class Spread(msgspec.Struct, frozen=True):
    """Distribution of one latency, milliseconds."""

    count: int
    mean: float
    percentiles: dict[str, float]
    """By name, such as "p99"."""
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests within all limits."""

    share: float
    """Of all that were sent, failed ones included, interrupted ones not."""
    requests_per_s: float


class BenchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one measurement. Latencies are of requests that are ok, and count from when they were due."""

    sent: int
    ok: int
    interrupted: int
    """Open at Ctrl-C; they count nowhere else."""
    failed: dict[str, int]
    """By status, most frequent first."""
    seconds: float
    """From the start to the end of the last request."""
    input_tokens: int
    """Of requests that are ok; so are the next two."""
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    most_open: int
    """The most requests that were open at once."""
    goodput: Goodput | None
    """None without limits."""
    ttft_ms: Spread | None
    """Time to first token; None where no request is ok."""
    tpot_ms: Spread | None
    """Time per output token after the first, one value a request; None where none has two tokens."""
    itl_ms: Spread | None
    """Inter-token latency: gaps between events with text, all requests together."""
    e2e_ms: Spread | None
    """From due to the end of the response."""
    lag_ms: Spread | None
    """How late the client was; it is part of the latencies."""


def summarise(measured: Measured, limits: LatencyLimits, percentiles: Sequence[float]) -> BenchSummary:
    """The figures of all outcomes."""
    outcomes = [outcome for outcome in measured.outcomes if outcome.status != INTERRUPTED]
    ok = [outcome for outcome in outcomes if outcome.ok]
    seconds = max(measured.seconds, 1e-9)
    good = sum(is_good(outcome, limits) for outcome in outcomes)
    limited = limits.ttft_s is not None or limits.tpot_s is not None
    inputs, outputs = sum(each.input_tokens for each in ok), sum(each.output_tokens for each in ok)

    def spread(values: Sequence[float]) -> Spread | None:
        return _spread(values, percentiles)

    return BenchSummary(
        sent=len(measured.outcomes),
        ok=len(ok),
        interrupted=len(measured.outcomes) - len(outcomes),
        failed=dict(Counter(each.status for each in outcomes if not each.ok).most_common()),
        seconds=measured.seconds,
        input_tokens=inputs,
        cached_tokens=sum(each.cached_tokens for each in ok),
        output_tokens=outputs,
        requests_per_s=len(ok) / seconds,
        input_tokens_per_s=inputs / seconds,
        output_tokens_per_s=outputs / seconds,
        most_open=max((count for _, count in open_counts(measured.outcomes)), default=0),
        goodput=Goodput(good / max(1, len(outcomes)), good / seconds) if limited else None,
        ttft_ms=spread([each.ttft_s for each in ok]),
        tpot_ms=spread([tpot for each in ok if (tpot := each.tpot_s) is not None]),
        itl_ms=spread([later - earlier for each in ok for earlier, later in pairwise(each.token_s)]),
        e2e_ms=spread([each.e2e_s for each in ok]),
        lag_ms=spread([each.lag_s for each in outcomes]),
    )


def is_good(outcome: BenchOutcome, limits: LatencyLimits) -> bool:
    """Whether a request is ok and within the limits; one without a second token has no TPOT to limit."""
    if not outcome.ok or (limits.ttft_s is not None and outcome.ttft_s > limits.ttft_s):
        return False
    tpot = outcome.tpot_s
    return limits.tpot_s is None or tpot is None or tpot <= limits.tpot_s


def open_counts(outcomes: Sequence[BenchOutcome]) -> list[tuple[float, int]]:
    """Seconds and requests that are open from then on, at each moment at which one is sent or has ended."""
    moments = sorted([(each.sent_s, 1) for each in outcomes] + [(each.ended_s, -1) for each in outcomes])
    counts = accumulate(change for _, change in moments)
    return [(at, count) for (at, _), count in zip(moments, counts, strict=True)]


def _spread(values: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(1000 * value for value in values)
    found = {f"p{percentile:g}": quantile(ordered, percentile / 100) or 0.0 for percentile in percentiles}
    return Spread(len(ordered), sum(ordered) / len(ordered), found, ordered[-1])
