"""The report of a sweep, and the table that it is printed as."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.scheduler.costs.chunking import Cost
from headrace.tools.output import table
from headrace.tools.simulate.objectives import CLASSES
from headrace.tools.simulate.summary import MeanAndTail, ReplaySummary

NOTHING = "-"
MOST_TENANTS = 12  # columns; JSON has all


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    load: float | None
    """Engine seconds of work offered per second; None where all requests come at once."""
    swept: dict[str, Any]
    """Values of the flags that vary, by key; load is not among them."""
    policy: str
    promise: float
    """Share of promised times that are to be kept; 0: none are promised."""
    replicas: int
    chunk_tokens: int
    kv_pages: int
    host_pages: int
    page_size: int
    plans: int
    """Forward passes of all replicas."""
    summary: ReplaySummary


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep over one trace."""

    trace: str
    """Name of the file."""
    requests: int
    tokens: int
    """Prompt tokens of all requests."""
    trace_s: float
    """Seconds from the first to the last arrival in the trace."""
    engine: str
    """Where the costs are from."""
    costs: Sequence[Cost]
    """Seconds per squared token, per token, and per forward pass: of all stages together, or of each."""
    latency_s: float
    """Seconds that every request takes outside the scheduler and the stages."""
    objective: str
    objective_sent: bool
    """Every request asked for its objective."""
    retries: int
    """How often a refused client came again."""
    rows: Sequence[Row]


def as_text(report: ReplayReport) -> str:
    """What was replayed, and a table with a line for each replay."""
    costs = "; ".join(f"{a:.3g} l² + {b:.3g} l + {c:.3g} s" for a, b, c in report.costs)
    about = (
        f"{report.trace}: {report.requests:,} requests, {report.tokens:,} prompt tokens, {report.trace_s:,.0f} s; "
        f"{report.engine}: {costs}; objective {report.objective}"
    )
    swept = list(report.rows[0].swept)
    header = ["load", *swept, *(f"{name} P50 P99" for name in CLASSES), *_SHARES]
    rows = [[_load(row), *(str(row.swept[key]) for key in swept), *_figures(row.summary)] for row in report.rows]
    if report.rows[0].summary.decode is not None:
        header += _DECODE
        rows = [[*cells, *_decode(row.summary)] for cells, row in zip(rows, report.rows, strict=True)]
    if any(row.summary.promises is not None for row in report.rows):
        header += _PROMISES
        rows = [[*cells, *_promises(row.summary)] for cells, row in zip(rows, report.rows, strict=True)]
    if report.retries:
        header += _RETRIES
        rows = [[*cells, *_retries(row.summary)] for cells, row in zip(rows, report.rows, strict=True)]
    shown = table([header, *rows])
    more = _by_tenant(report, swept) + _by_turn(report, swept)
    return f"{about}\nTime to first token in seconds, shares in %.\n\n{shown}{more}"


def _by_tenant(report: ReplayReport, swept: Sequence[str]) -> str:
    """A table of goodput by tenant; nothing where the trace has no tenants."""
    tenants = list(report.rows[0].summary.tenants)[:MOST_TENANTS]
    if not tenants:
        return ""
    rows = [
        [
            _load(row),
            *(str(row.swept[key]) for key in swept),
            *(f"{100 * row.summary.tenants[tenant]:.1f}" for tenant in tenants),
        ]
        for row in report.rows
    ]
    header = ["load", *swept, *(tenant or NOTHING for tenant in tenants)]
    return f"\n\nGoodput by tenant, those of most requests first, in %.\n\n{table([header, *rows])}"


def _by_turn(report: ReplayReport, swept: Sequence[str]) -> str:
    """A table of hits by tenant, engine seconds and times by turn; nothing where turns were not looked for."""
    first = report.rows[0].summary
    if not first.turns:
        return ""
    tenants = list(first.tenant_hits)[:MOST_TENANTS]
    offers = any(row.summary.offers for row in report.rows)
    rows = [
        [
            _load(row),
            *(str(row.swept[key]) for key in swept),
            f"{100 * row.summary.hits:.1f}",
            *(f"{100 * row.summary.tenant_hits[tenant]:.1f}" for tenant in tenants),
            f"{row.summary.busy_s:,.0f}",
            *(_mean_and_tail(times) for times in row.summary.turns.values()),
            *([_taken(row.summary.offers)] if offers else []),
        ]
        for row in report.rows
    ]
    hits = ("hits", *(f"hits {tenant}" for tenant in tenants))
    header = ["load", *swept, *hits, "engine s", *(f"turn {name}, mean P99" for name in first.turns)]
    header += ["offers taken"] if offers else []
    return f"\n\nHits in %, engine seconds, and time to first token by turn.\n\n{table([header, *rows])}"


def _mean_and_tail(times: MeanAndTail) -> str:
    return f"{_seconds(times.mean_s)} {_seconds(times.p99_s):>6}"


def _taken(offers: dict[str, int]) -> str:
    return f"{offers.get('taken', 0):,} of {sum(offers.values()):,}" if offers else NOTHING


_SHARES = ("longest", "goodput", "by tokens", "busy", "hits", "tokens/s", "refused")


_DECODE = ("TTFT mean P99", "TPOT mean P99, ms", "total mean P99", "remote")
_PROMISES = ("promised", "kept", *(f"bound/TTFT {name}" for name in (*CLASSES, "all")))
_RETRIES = ("retried", "1st retry")


def _load(row: Row) -> str:
    return NOTHING if row.load is None else f"{row.load:.2f}"


def _figures(summary: ReplaySummary) -> list[str]:
    times = [f"{_seconds(summary.ttft[name].p50_s)} {_seconds(summary.ttft[name].p99_s):>6}" for name in CLASSES]
    shares = (summary.goodput, summary.goodput_tokens, summary.utilisation, summary.hits)
    refused = sum(summary.refused.values())
    return [
        *times,
        _seconds(summary.longest_s),
        *(f"{100 * share:.1f}" for share in shares),
        f"{summary.tokens_per_s:,.0f}",
        f"{refused:,}" if refused else NOTHING,
    ]


def _decode(summary: ReplaySummary) -> list[str]:
    decode = summary.decode
    if decode is None:
        return [NOTHING] * len(_DECODE)
    ms = [_seconds(None if value is None else 1000 * value) for value in (decode.token_s.mean_s, decode.token_s.p99_s)]
    return [
        f"{_seconds(summary.mean_s)} {_seconds(summary.ttft['all'].p99_s):>6}",
        f"{ms[0]} {ms[1]:>6}",
        f"{_seconds(decode.total.mean_s)} {_seconds(decode.total.p99_s):>6}",
        f"{100 * decode.remote:.1f}",
    ]


def _promises(summary: ReplaySummary) -> list[str]:
    promises = summary.promises
    if promises is None:
        return [NOTHING] * len(_PROMISES)
    found = promises.classes["all"]
    kept, ratio = found.kept, found.ratio
    return [
        f"{found.promised:,}",
        NOTHING if kept is None else f"{100 * kept:.2f}",
        *(_seconds(promises.classes[name].ratio) for name in CLASSES),
        _seconds(ratio),
    ]


def _retries(summary: ReplaySummary) -> list[str]:
    share = summary.first_retry_accepted
    return [f"{summary.retried:,}", NOTHING if share is None else f"{100 * share:.1f}"]


def _seconds(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
