"""Draws the figures of a sweep as a PNG, with matplotlib (the extra headrace[plot])."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.tools.output import new_figure, save_figure
from headrace.tools.simulate.objectives import CLASSES
from headrace.tools.simulate.report import ReplayReport, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Row], float | None]

SHARES: dict[str, Value] = {
    "goodput, % of requests": lambda row: 100 * row.summary.goodput,
    "utilisation, %": lambda row: 100 * row.summary.utilisation,
    "cache hits, % of tokens": lambda row: 100 * row.summary.hits,
}


def draw(report: ReplayReport, path: Path) -> None:
    """Write the picture: time to first token by length class above, shares below. Raises ConfigError for a file that
    cannot be written."""
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
