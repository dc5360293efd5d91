"""Draws the figures of a sweep as a PNG, with matplotlib (the extra headrace[plot])."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.tools.output import new_figure, save_figure
from headrace.tools.simulate.objectives import CLASSES, length_class
from headrace.tools.simulate.report import ReplayReport, Row
from headrace.tools.simulate.summary import PromiseSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float | None]

SHOWN = 300  # promises whose share is drawn as one point

SHARES: dict[str, Value] = {
    "goodput, % of requests": lambda row: 100 * row.summary.goodput,
    "utilisation, %": lambda row: 100 * row.summary.utilisation,
    "cache hits, % of tokens": lambda row: 100 * row.summary.hits,
}


def draw(report: ReplayReport, path: Path) -> None:
    """Write the picture: time to first token by length class above, shares below. Of a single replay with promises, it
    is what became of them. Raises ConfigError for a file that cannot be written."""
    promises = report.rows[0].summary.promises
    if len(report.rows) == 1 and promises is not None:
        _draw_promises(report, promises, path)
        return
    name, series = split(report.rows)
    figure = new_figure(13, 7.5)
    axes = figure.subplots(2, 3)
    for column, group in enumerate(CLASSES):
        panel = axes[0][column]
        _lines(panel, name, series, lambda row, group=group: row.summary.ttft[group].p99_s, "-", "P99")  # type: ignore[misc]
        _lines(panel, name, series, lambda row, group=group: row.summary.ttft[group].p50_s, "--", "P50")  # type: ignore[misc]
        panel.set_title(f"time to first token, {group} prompts, s", fontsize=10)
        panel.set_yscale("log")
    for column, (title, value) in enumerate(SHARES.items()):
        _lines(axes[1][column], name, series, value, "-", "")
        axes[1][column].set_title(title, fontsize=10)
        axes[1][column].set_ylim(0, 105)
    for panel in axes.flat:
        panel.set_xlabel(name)
        panel.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{report.trace}: {report.requests:,} requests; {report.engine}; objective {report.objective}")
    save_figure(figure, path)


def _draw_promises(report: ReplayReport, promises: PromiseSummary, path: Path) -> None:
    """Promised and actual times, the share that is kept as time goes on, and how far above the actual times bounds
    are."""
    figure = new_figure(13, 4.2)
    bounds, kept, ratios = figure.subplots(1, 3)
    for index, name in enumerate(CLASSES):
        points = [point for point in promises.points if length_class(point.tokens) == name]
        times, promised = [point.ttft_s for point in points], [point.bound_s for point in points]
        bounds.scatter(times, promised, s=3, alpha=0.4, color=f"C{index}", label=name)
        above = sorted(point.bound_s / point.ttft_s for point in points)
        shares = [100 * (number + 1) / len(above) for number in range(len(above))]
        ratios.plot(above, shares, color=f"C{index}", label=name)
    ends = [min(point.ttft_s for point in promises.points), max(point.bound_s for point in promises.points)]
    bounds.plot(ends, ends, color="black", linewidth=0.8)
    bounds.set(xscale="log", yscale="log", xlabel="time to first token, s", ylabel="promised, s")
    bounds.set_title("each promise; below the line it was broken", fontsize=10)
    bounds.legend(fontsize=8)
    within = [point.ttft_s <= point.bound_s for point in promises.points]
    shown = range(SHOWN, len(within) + 1)
    kept.plot(
        [promises.points[end - 1].arrival_s for end in shown],
        [100 * sum(within[end - SHOWN : end]) / SHOWN for end in shown],
        label=f"of the last {SHOWN}",
    )
    kept.axhline(100 * report.rows[0].promise, color="black", linewidth=0.8, label="promised")
    kept.set(xlabel="time of the replay, s", ylim=(90, 100.2))
    kept.set_title("promises that were kept, %", fontsize=10)
    kept.legend(fontsize=8)
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set(xscale="log", xlabel="promised time / actual time", ylabel="share of the promises below, %")
    ratios.set_title("how tight they are", fontsize=10)
    ratios.legend(fontsize=8)
    for panel in (bounds, kept, ratios):
        panel.grid(alpha=0.3)
    row = report.rows[0]
    load = "" if row.load is None else f", load {row.load:.2f}"
    about = f"{report.trace}: {report.requests:,} requests; {report.engine}; policy {row.policy}{load}"
    figure.suptitle(about, fontsize=10)
    save_figure(figure, path)


def split(rows: Sequence[Row]) -> tuple[str, dict[str, list[tuple[float, Row]]]]:
    """The name of what the horizontal axis shows, and the rows of each line by its label.

    The axis is the load where it varies, else the last flag whose values are numbers and vary, else the load.
    """
    numeric = [key for key, value in rows[0].swept.items() if isinstance(value, int | float)]
    name = "load" if len({row.load for row in rows}) > 1 or not numeric else numeric[-1]
    series: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        label = ", ".join(f"{key} {value}" for key, value in row.swept.items() if key != name)
        at = row.load if name == "load" else row.swept[name]
        series.setdefault(label, []).append((at or 0.0, row))
    return name, {label: sorted(points, key=lambda point: point[0]) for label, points in series.items()}


def _lines(
    panel: "Axes", name: str, series: dict[str, list[tuple[float, Row]]], value: Value, style: str, suffix: str
) -> None:
    """One line for each series; classes without requests have none."""
    for index, (label, points) in enumerate(series.items()):
        found = [(at, drawn) for at, row in points if (drawn := value(row)) is not None]
        text = " ".join(filter(None, (label, suffix)))
        panel.plot(
            [at for at, _ in found],
            [drawn for _, drawn in found],
            style,
            marker="o",
            markersize=3,
            color=f"C{index % 10}",
            label=text,
        )
