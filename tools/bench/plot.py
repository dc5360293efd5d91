"""Draws a measurement as a PNG, with matplotlib (the extra headrace[plot])."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.tools.bench.outcome import INTERRUPTED, BenchOutcome
from headrace.tools.bench.report import BenchReport
from headrace.tools.bench.summary import open_counts
from headrace.tools.output import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture: distributions of the latencies, time to first token by arrival, open requests. Raises
    ConfigError for a file that cannot be written."""
    figure = new_figure(12, 7.5)
    axes = figure.subplots(2, 2)
    ok = [each for each in report.requests if each.ok]
    limits = report.limits
    _distribution(axes[0][0], "time to first token, ms", {"": [each.ttft_s for each in ok]}, limits.ttft_s)
    gaps = [later - earlier for each in ok for earlier, later in pairwise(each.token_s)]
    tpots = [tpot for each in ok if (tpot := each.tpot_s) is not None]
    _distribution(axes[0][1], "time per token, ms", {"TPOT": tpots, "ITL": gaps}, limits.tpot_s)
    _by_arrival(axes[1][0], report.requests, limits.ttft_s)
    _open(axes[1][1], report.requests)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    summary = report.summary
    figure.suptitle(
        f"{report.model} at {report.url}{report.endpoint}: {report.arrivals}; {summary.sent:,} requests, "
        f"{sum(summary.failed.values()):,} failed",
        fontsize=10,
    )
    save_figure(figure, path)


def _distribution(panel: "Axes", title: str, series: dict[str, Sequence[float]], limit_s: float | None) -> None:
    """Share of values below each one."""
    for name, values in series.items():
        ordered = sorted(1000 * value for value in values)
        shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
        panel.step(ordered, shares, where="post", label=name or None)
    if any(series) and any(series.values()):
        panel.legend(fontsize=8)
    _limit(panel.axvline, limit_s)
    panel.set(xlabel=title, ylabel="% of values below", ylim=(0, 101))


def _by_arrival(panel: "Axes", requests: Sequence[BenchOutcome], limit_s: float | None) -> None:
    ok = [each for each in requests if each.ok]
    failed = [each for each in requests if not each.ok and each.status != INTERRUPTED]
    panel.scatter([each.due_s for each in ok], [1000 * each.ttft_s for each in ok], s=6, label="first token")
    if failed:
        ends = [1000 * (each.ended_s - each.due_s) for each in failed]
        panel.scatter([each.due_s for each in failed], ends, s=16, marker="x", color="C3", label="failed")
        panel.legend(fontsize=8)
    _limit(panel.axhline, limit_s)
    panel.set(xlabel="arrival, s", ylabel="time to first token, ms", ylim=(0, None))


def _open(panel: "Axes", requests: Sequence[BenchOutcome]) -> None:
    counts = open_counts(requests)
    panel.step([at for at, _ in counts], [count for _, count in counts], where="post")
    panel.set(xlabel="time, s", ylabel="open requests", ylim=(0, None))


def _limit(line: Callable[..., object], limit_s: float | None) -> None:
    if limit_s is not None:
        line(1000 * limit_s, color="C3", linestyle=":", linewidth=1)
