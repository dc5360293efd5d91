"""Draws a recording: queues and pages over time, the passes of every rank, and a bar for each request by phase.

As a PNG, with matplotlib (the extra headrace[plot]), or as one HTML page that needs nothing else: an inline SVG, whose
parts say what they are when the pointer is on them.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.types.errors import ConfigError
from headrace.scheduler.requests.phase import Phase
from headrace.tools.output import new_figure, save_figure
from headrace.tools.replay.timeline import LoadPoint, RecordedTimeline, RequestLife
from headrace.tools.replay.words import brief, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

MOST_BARS = 400  # requests
MOST_NAMED = 60  # requests whose names are beside their bars in a PNG
FINEST = 2000  # spans closer to each other than this part of the picture's width are drawn as one
COLORS = {
    Phase.BOOTSTRAP: "#b8c0cc",
    Phase.WAITING: "#f2c14e",
    Phase.RUNNING: "#3a7ca5",
    Phase.FETCHING: "#81a4cd",
    Phase.INFLIGHT: "#5b8e7d",
    Phase.GENERATING: "#8cb369",
}
NAMES = {
    Phase.BOOTSTRAP: "waits for its decode server",
    Phase.WAITING: "waits",
    Phase.RUNNING: "computed",
    Phase.FETCHING: "fetched",
    Phase.INFLIGHT: "sent",
    Phase.GENERATING: "decodes",
}
PREFILL, DECODE, FAILED = "#3a7ca5", "#8cb369", "#bc4b51"
LINES = {"waiting": "#d1890b", "running": "#3a7ca5"}  # of the first panel
TOKENS, LEASED, USED = "#7d5ba6", "#bc4b51", "#9aa5b1"


class Window(NamedTuple):
    """The part of a recording that is drawn. Seconds since it began, as in all that follows."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class BusySpan(NamedTuple):
    """Passes of one rank that are drawn as one."""

    start: float
    end: float
    passes: int
    tokens: int
    decodes: bool
    """Most of their rows decode."""


class RequestBar(NamedTuple):
    """A request that is drawn."""

    name: str
    spans: tuple[tuple[Phase, float, float], ...]
    first_token: float | None
    failed: float | None
    about: str


def whole(timeline: RecordedTimeline) -> Window:
    """All of a recording."""
    return Window(0.0, timeline.ended - timeline.began)


def bars(timeline: RecordedTimeline, window: Window) -> tuple[list[RequestBar], int]:
    """The requests that are drawn, by arrival, and how many are not: those that were here for the shortest time."""
    first, last = window.start + timeline.began, window.end + timeline.began
    known = (life for life in timeline.lives if life.phases)
    lives = [life for life in known if life.phases[-1].end >= first and life.phases[0].start <= last]
    kept = sorted(lives, key=_length, reverse=True)[:MOST_BARS]
    chosen = {id(life) for life in kept}
    return [_bar(life, timeline.began, window) for life in lives if id(life) in chosen], len(lives) - len(kept)


def busy(timeline: RecordedTimeline, rank: int, window: Window) -> list[BusySpan]:
    """The passes of a rank, those that are close to each other together."""
    least = window.seconds / FINEST
    found: list[BusySpan] = []
    for one in timeline.passes:
        start, end = max(window.start, one.start - timeline.began), min(window.end, one.end - timeline.began)
        if one.rank != rank or start > end:
            continue
        decodes = 2 * one.decodes > len(one.rows)
        last = found[-1] if found else None
        if last is not None and last.decodes == decodes and start - last.end < least and end - last.start < 4 * least:
            found[-1] = BusySpan(last.start, end, last.passes + 1, last.tokens + one.tokens, decodes)
        else:
            found.append(BusySpan(start, end, 1, one.tokens, decodes))
    return found


def draw(timeline: RecordedTimeline, title: str, path: Path, window: Window) -> None:
    """Write the picture, as PNG or HTML by the name of the file. Raises ConfigError for a file that cannot be
    written."""
    if path.suffix.lower() == ".png":
        _draw_png(timeline, title, path, window)
        return
    try:
        path.write_text(as_html(timeline, title, window), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _length(life: RequestLife) -> float:
    return life.phases[-1].end - life.phases[0].start


def _bar(life: RequestLife, began: float, window: Window) -> RequestBar:
    cut = [(one.phase, max(window.start, one.start - began), min(window.end, one.end - began)) for one in life.phases]
    spans = tuple((phase, start, end) for phase, start, end in cut if phase in COLORS and start < end)

    def shown(at: float | None) -> float | None:
        return at - began if at is not None and window.start <= at - began <= window.end else None

    parts = [f"{short(life.rid)}: {life.prompt_tokens:,} tokens"]
    parts += [f"first token after {life.ttft_s:.3f} s"] if life.ttft_s is not None else []
    parts += [f"ended: {life.outcome}"] if life.outcome else ["open at the end"]
    return RequestBar(
        brief(life.rid),
        spans,
        shown(life.first_token),
        shown(life.ended) if life.failed else None,
        ", ".join(parts),
    )


# The PNG.


def _draw_png(timeline: RecordedTimeline, title: str, path: Path, window: Window) -> None:
    requests, left_out = bars(timeline, window)
    rows, ranks = max(8, min(60, len(requests))), max(1, len(timeline.ranks))
    figure = new_figure(14, 5 + 0.35 * ranks + 0.11 * rows)
    ratios = [2.2, 1.6, 0.4 + 0.35 * ranks, 0.11 * rows + 0.6]
    panels = figure.subplots(4, 1, sharex=True, height_ratios=ratios)
    _draw_queues(panels[0], timeline)
    _draw_pages(panels[1], timeline)
    _draw_passes(panels[2], timeline, window)
    _draw_requests(panels[3], requests, left_out)
    panels[3].set_xlim(window.start - 0.01 * window.seconds, window.end + 0.01 * window.seconds)
    for panel in panels:
        panel.grid(alpha=0.3, axis="x")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _draw_queues(panel: "Axes", timeline: RecordedTimeline) -> None:
    """Requests that wait and that have pages, and the tokens that are left to plan."""
    at, points = _points(timeline)
    panel.step(at, [point.waiting for point in points], where="post", color=LINES["waiting"], label="wait")
    panel.step(at, [point.running for point in points], where="post", color=LINES["running"], label="have pages")
    panel.legend(fontsize=8, loc="upper left")
    panel.set_ylabel("requests")
    right = panel.twinx()
    right.step(at, [point.unplanned for point in points], where="post", color=TOKENS, linewidth=0.8)
    right.set_ylabel("tokens to plan", color=TOKENS, fontsize=8)


def _draw_pages(panel: "Axes", timeline: RecordedTimeline) -> None:
    """What of the pools is leased, and cached besides."""
    at, points = _points(timeline)
    used, leased = [point.used_pages for point in points], [point.leased_pages for point in points]
    panel.fill_between(at, used, step="post", color=USED, alpha=0.5, linewidth=0, label="cached")
    panel.fill_between(at, leased, step="post", color=LEASED, alpha=0.7, linewidth=0, label="leased")
    panel.set_ylim(0, max(1, timeline.pages) * 1.05)
    panel.legend(fontsize=8, loc="upper left")
    panel.set_ylabel("KV pages")


def _draw_passes(panel: "Axes", timeline: RecordedTimeline, window: Window) -> None:
    """A row for each rank."""
    for place, rank in enumerate(timeline.ranks):
        spans = busy(timeline, rank, window)
        for decodes, color in ((False, PREFILL), (True, DECODE)):
            found = [(one.start, one.end - one.start) for one in spans if one.decodes == decodes]
            panel.broken_barh(found, (place - 0.4, 0.8), color=color)
    panel.set_ylim(max(1, len(timeline.ranks)) - 0.5, -0.5)
    panel.set_yticks(range(len(timeline.ranks)), list(timeline.ranks.values()), fontsize=8)


def _draw_requests(panel: "Axes", requests: Sequence[RequestBar], left_out: int) -> None:
    """A bar for each, by phase; dots are first tokens, crosses failures."""
    for row, bar in enumerate(requests):
        for phase, start, end in bar.spans:
            panel.broken_barh([(start, end - start)], (row - 0.45, 0.9), color=COLORS[phase])
    tokens = [(bar.first_token, row) for row, bar in enumerate(requests) if bar.first_token is not None]
    panel.scatter([x for x, _ in tokens], [y for _, y in tokens], s=4, color="black", zorder=3)
    failed = [(bar.failed, row) for row, bar in enumerate(requests) if bar.failed is not None]
    panel.scatter([x for x, _ in failed], [y for _, y in failed], s=14, marker="x", color=FAILED, zorder=3)
    panel.set_ylim(max(1, len(requests)) - 0.5, -0.5)
    if len(requests) <= MOST_NAMED:
        panel.set_yticks(range(len(requests)), [bar.name for bar in requests], fontsize=6)
    panel.set_ylabel(f"requests{f' (without {left_out:,} short ones)' if left_out else ''}")
    panel.set_xlabel("seconds")
    drawn = {phase for bar in requests for phase, _, _ in bar.spans}
    handles = [_patch(COLORS[phase], NAMES[phase]) for phase in COLORS if phase in drawn]
    panel.legend(handles=handles, fontsize=8, ncols=max(1, len(handles)), loc="lower left", bbox_to_anchor=(0, 1.0))


def _points(timeline: RecordedTimeline) -> tuple[list[float], list[LoadPoint]]:
    """The counts, the last one again at the end, and their times."""
    points = [*timeline.loads, timeline.loads[-1]]
    return [*(point.at - timeline.began for point in timeline.loads), timeline.ended - timeline.began], points


def _patch(color: str, label: str) -> "Patch":
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


# The HTML page.

WIDTH, LEFT, RIGHT = 1280, 150, 20
PANEL, GAP, RANK, BAR = 110, 34, 20, 9
STYLE = """
body { font: 13px/1.4 system-ui, sans-serif; margin: 1.5em; color: #1f2933; background: #fff }
svg text { font: 11px system-ui, sans-serif; fill: #52606d }
.axis { stroke: #cbd2d9; stroke-width: 1 } .line { fill: none; stroke-width: 1.3 }
.bar:hover { opacity: .7 } .key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em }
"""


def as_html(timeline: RecordedTimeline, title: str, window: Window) -> str:
    """The picture as an HTML page."""
    requests, left_out = bars(timeline, window)
    svg = _Svg(window)
    shown = "".join(svg.parts(timeline, requests))
    keys = "".join(_key(COLORS[phase], NAMES[phase]) for phase in COLORS)
    keys += _key(DECODE, "passes that mostly decode") + _key(FAILED, "failed")
    more = f"<p>Without {left_out:,} requests that were here for the shortest time.</p>" if left_out else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1 style='font-size:1.1em'>{escape(title)}</h1>\n"
        f"<p>Requests by phase:{keys}<br>A black dot is a first token. What a part is, is said under the pointer.</p>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {svg.bottom:.0f}" width="100%" role="img">'
        f"{shown}</svg>{more}</body></html>\n"
    )


def _key(color: str, text: str) -> str:
    return f'<span class="key" style="background:{color}"></span>{escape(text)}'


class _Svg:
    """Places the parts of the picture, from top to bottom."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._scale = (WIDTH - LEFT - RIGHT) / (window.seconds or 1.0)
        self.bottom = 10.0

    def parts(self, timeline: RecordedTimeline, requests: Sequence[RequestBar]) -> Iterator[str]:
        """All parts."""
        began, loads = timeline.began, timeline.loads
        waiting = [(point.at - began, point.waiting) for point in loads]
        running = [(point.at - began, point.running) for point in loads]
        yield from self._panel(
            "requests", [(waiting, LINES["waiting"], "wait"), (running, LINES["running"], "have pages")]
        )
        yield from self._panel(
            "tokens to plan", [([(p.at - began, p.unplanned) for p in loads], TOKENS, "tokens to plan")]
        )
        used = [(point.at - began, point.used_pages) for point in loads]
        leased = [(point.at - began, point.leased_pages) for point in loads]
        lines = [(used, USED, "leased or cached pages"), (leased, LEASED, "leased pages")]
        yield from self._panel("KV pages", lines, timeline.pages)
        for rank, name in timeline.ranks.items():
            yield self._text(self.bottom + RANK - 6, name)
            for one in busy(timeline, rank, self._window):
                about = f"{one.passes} passes, {one.tokens:,} tokens" if one.passes > 1 else f"{one.tokens:,} tokens"
                color = DECODE if one.decodes else PREFILL
                yield self._rect(one.start, one.end, self.bottom, RANK - 4, color, f"{name}: {about}")
            self.bottom += RANK
        self.bottom += GAP / 2
        for bar in requests:
            yield from self._request(bar)
        yield from self._axis()

    def _panel(
        self, title: str, lines: Sequence[tuple[Sequence[tuple[float, int]], str, str]], highest: int = 0
    ) -> Iterator[str]:
        """Counts over time."""
        most = max([1, highest, *(value for points, _, _ in lines for _, value in points)])
        base = self.bottom + PANEL
        yield f'<line class="axis" x1="{LEFT}" y1="{base:.1f}" x2="{WIDTH - RIGHT}" y2="{base:.1f}"/>'
        yield self._text(base, "0")
        yield self._text(self.bottom + 10, f"{most:,}")
        yield self._text(self.bottom + PANEL / 2, title)
        for points, color, name in lines:
            path = self._steps(points, base, (PANEL - 6) / most)
            if path:
                yield f'<path class="line" d="{path}" stroke="{color}"><title>{escape(name)}</title></path>'
        self.bottom = base + GAP / 2

    def _steps(self, points: Iterable[tuple[float, int]], base: float, unit: float) -> str:
        """A line that keeps each value until the next one; values within a pixel of each other are one, the highest."""
        found: list[str] = []
        pixel, highest, before = -1, 0, None
        ordered = [(at, value) for at, value in points if at <= self._window.end]
        for number, (at, value) in enumerate(ordered):
            here = int(self._x(at))
            highest = max(highest, value) if here == pixel else value
            pixel = here
            if number + 1 < len(ordered) and int(self._x(ordered[number + 1][0])) == here:
                continue
            if before is not None:
                found.append(f"L{here} {before:.1f}")
            before = base - unit * highest
            found.append(f"{'L' if found else 'M'}{here} {before:.1f}")
            before = base - unit * value
            found.append(f"L{here} {before:.1f}")
        if found and before is not None:
            found.append(f"L{self._x(self._window.end):.0f} {before:.1f}")
        return "".join(found)

    def _request(self, bar: RequestBar) -> Iterator[str]:
        yield self._text(self.bottom + BAR - 1, bar.name if len(bar.name) <= 22 else f"{bar.name[:21]}…")
        for phase, start, end in bar.spans:
            about = f"{bar.about}; {NAMES[phase]} {end - start:.3f} s from {start:.3f} s"
            yield self._rect(start, end, self.bottom, BAR - 1, COLORS[phase], about)
        middle = self.bottom + BAR / 2
        if bar.first_token is not None:
            x = self._x(bar.first_token)
            yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="2"><title>{escape(bar.about)}</title></circle>'
        if bar.failed is not None:
            yield self._rect(bar.failed, bar.failed, self.bottom, BAR - 1, FAILED, bar.about, least=3)
        self.bottom += BAR + 2

    def _axis(self) -> Iterator[str]:
        step = next(size for size in _steps_of_time() if self._window.seconds / size <= 12)
        self.bottom += 4
        for number in range(ceil(self._window.start / step), int(self._window.end / step) + 1):
            x = self._x(number * step)
            yield f'<line class="axis" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{self.bottom:.1f}" opacity=".5"/>'
            yield f'<text x="{x:.1f}" y="{self.bottom + 12:.1f}" text-anchor="middle">{number * step:g} s</text>'
        self.bottom += 20

    def _rect(
        self, start: float, end: float, top: float, height: float, color: str, about: str, least: float = 0.6
    ) -> str:
        x, width = self._x(start), max(least, (end - start) * self._scale)
        return (
            f'<rect class="bar" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}">'
            f"<title>{escape(about)}</title></rect>"
        )

    def _text(self, y: float, text: str) -> str:
        return f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{escape(text)}</text>'

    def _x(self, seconds: float) -> float:
        return LEFT + max(0.0, seconds - self._window.start) * self._scale


def _steps_of_time() -> Iterator[float]:
    """1, 2, 5, 10 …, from milliseconds on."""
    size = 0.001
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10
