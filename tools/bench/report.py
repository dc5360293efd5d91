"""The report of a measurement, and the table that it is printed as."""

from collections.abc import Sequence

import msgspec

from headrace.tools.bench.outcome import OK, BenchOutcome
from headrace.tools.bench.summary import BenchSummary, LatencyLimits, Spread
from headrace.tools.output import table

LATE_MS = 20.0  # P99 of the client's lag that is worth a warning
LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2e_ms", "client lag": "lag_ms"}


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement and what it was of."""

    url: str
    endpoint: str
    model: str
    server: str
    """Name and version, "" where the server does not say."""
    role: str
    """Of a Headrace server; "" of another one."""
    arrivals: str
    """How requests arrived, in words."""
    lengths: str
    """What they asked for, in words."""
    seed: int
    warmups: int
    limits: LatencyLimits
    interrupted: bool
    summary: BenchSummary
    requests: Sequence[BenchOutcome]
    """In the order in which they ended."""


def as_text(report: BenchReport) -> str:
    """What was measured, counts and rates, and a table with a line for each latency."""
    summary = report.summary
    server = f" ({report.server})" if report.server else ""
    parts = [
        f"{report.url}{report.endpoint}{server}, model {report.model}",
        f"{report.arrivals}; {report.lengths}; seed {report.seed}; {report.warmups} warm-up requests",
        "",
        *(f"{name:<22}{text}" for name, text in _counts(report)),
        "",
        _latencies(summary),
    ]
    if warning := _warning(report):
        parts += ["", warning]
    return "\n".join(parts)


def _counts(report: BenchReport) -> list[tuple[str, str]]:
    summary = report.summary
    lines = [
        (
            "requests",
            f"{summary.sent:,} sent, {summary.ok:,} ok, {sum(summary.failed.values()):,} failed{_cut(summary)}",
        ),
        *((f"  failed: {status}", f"{count:,}{_message(report, status)}") for status, count in summary.failed.items()),
        ("duration", f"{summary.seconds:.2f} s, at most {summary.most_open:,} requests open"),
        ("requests/s", f"{summary.requests_per_s:,.2f}"),
        ("input tokens/s", f"{summary.input_tokens_per_s:,.0f}  ({_cached(summary)})"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.0f}"),
    ]
    if summary.goodput is not None:
        good = summary.goodput
        lines.append(
            ("goodput", f"{good.requests_per_s:,.2f} requests/s, {100 * good.share:.1f} % ({_limits(report.limits)})")
        )
    return lines


def _cut(summary: BenchSummary) -> str:
    return f", {summary.interrupted:,} interrupted" if summary.interrupted else ""


def _message(report: BenchReport, status: str) -> str:
    """The first message of this failure."""
    message = next((each.message for each in report.requests if each.status == status and each.message), "")
    return f"  {message[:120]}" if message else ""


def _cached(summary: BenchSummary) -> str:
    share = summary.cached_tokens / summary.input_tokens if summary.input_tokens else 0.0
    return f"{100 * share:.1f} % of them from the server's prefix cache"


def _limits(limits: LatencyLimits) -> str:
    named = (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s))
    return ", ".join(f"{name} ≤ {1000 * value:g} ms" for name, value in named if value is not None)


def _latencies(summary: BenchSummary) -> str:
    """Milliseconds, a line for each latency."""
    spreads: dict[str, Spread] = {
        name: found
        for name, field in LATENCIES.items()
        if (found := msgspec.structs.asdict(summary)[field]) is not None
    }
    if summary.ttft_ms is None:
        return "No request was answered."
    names = list(next(iter(spreads.values())).percentiles)
    rows = [["ms", "mean", *names, "max"]]
    for name, spread in spreads.items():
        rows.append([name, *(_ms(value) for value in (spread.mean, *spread.percentiles.values(), spread.max))])
    return table(rows, left=1)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _warning(report: BenchReport) -> str:
    lag = report.summary.lag_ms
    if lag is None or lag.max <= LATE_MS or (late := _late_share(report.requests)) < 0.01:
        return ""
    return (
        f"The client sent {100 * late:.0f} % of the requests more than {LATE_MS:.0f} ms late (--max-concurrency, or "
        "too little CPU for it); that is part of the latencies above."
    )


def _late_share(requests: Sequence[BenchOutcome]) -> float:
    return sum(1000 * each.lag_s > LATE_MS for each in requests) / max(1, len(requests))


def first_failure(requests: Sequence[BenchOutcome]) -> str:
    """Status and message of the first failure, for an error line."""
    failed = next(each for each in requests if each.status != OK)
    return f"{failed.status}: {failed.message}" if failed.message else failed.status
