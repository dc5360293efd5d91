"""Draws a recording: queues and pages over time, the passes of every rank, and a bar for each request by phase.

As a PNG, with matplotlib (the extra headrace[plot]), or as one HTML page that needs nothing else: an inline SVG, whose
parts say what they are when the pointer is on them.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.types.errors import ConfigError
from headrace.scheduler.requests.phase import Phase
from headrace.tools.output import new_figure, save_figure
from headrace.tools.replay.timeline import RecordedTimeline, RequestLife
from headrace.tools.replay.words import short

if TYPE_CHECKING:
    from matplotlib.patches import Patch

MOST_BARS = 400  # requests
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


class BusySpan(NamedTuple):
    """Passes of one rank that are drawn as one. Seconds since the recording began."""

    start: float
    end: float
    passes: int
    tokens: int
    decodes: bool
    """Most of their rows decode."""


class RequestBar(NamedTuple):
    """A request that is drawn. Seconds since the recording began."""

    name: str
    spans: tuple[tuple[Phase, float, float], ...]
    first_token: float | None
    failed: float | None
    about: str


def bars(timeline: RecordedTimeline) -> tuple[list[RequestBar], int]:
    """The requests that are drawn, by arrival, and how many are not: those that were here for the shortest time."""
    lives = [life for life in timeline.lives if life.phases]
    kept = sorted(lives, key=_length, reverse=True)[:MOST_BARS]
    chosen = {id(life) for life in kept}
    return [_bar(life, timeline) for life in lives if id(life) in chosen], len(lives) - len(kept)


def busy(timeline: RecordedTimeline, rank: int) -> list[BusySpan]:
    """The passes of a rank, those that are close to each other together."""
    least = (timeline.ended - timeline.began) / FINEST
    found: list[BusySpan] = []
    for one in timeline.passes:
        if one.rank != rank:
            continue
        start, end = max(0.0, one.start - timeline.began), one.end - timeline.began
        decodes = 2 * one.decodes > len(one.rows)
        last = found[-1] if found else None
        if last is not None and last.decodes == decodes and start - last.end < least and end - last.start < 4 * least:
            found[-1] = BusySpan(last.start, end, last.passes + 1, last.tokens + one.tokens, decodes)
        else:
            found.append(BusySpan(start, end, 1, one.tokens, decodes))
    return found


def draw(timeline: RecordedTimeline, title: str, path: Path) -> None:
    """Write the picture, as PNG or HTML by the name of the file. Raises ConfigError for a file that cannot be
    written."""
    if path.suffix.lower() == ".png":
        _draw_png(timeline, title, path)
        return
    try:
        path.write_text(as_html(timeline, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _length(life: RequestLife) -> float:
    return life.phases[-1].end - life.phases[0].start


def _bar(life: RequestLife, timeline: RecordedTimeline) -> RequestBar:
    began = timeline.began
    spans = tuple(
        (span.phase, max(0.0, span.start - began), span.end - began)
        for span in life.phases
        if span.phase in COLORS and span.end > began
    )
    parts = [f"{short(life.rid)}: {life.prompt_tokens:,} tokens"]
    parts += [f"first token after {life.ttft_s:.3f} s"] if life.ttft_s is not None else []
    parts += [f"ended: {life.outcome}"] if life.outcome else ["open at the end"]
    return RequestBar(
        short(life.rid),
        spans,
        None if life.first_token is None else life.first_token - began,
        life.ended - began if life.failed and life.ended is not None else None,
        ", ".join(parts),
    )


# --- PNG


def _draw_png(timeline: RecordedTimeline, title: str, path: Path) -> None:
    requests, left_out = bars(timeline)
    ranks = list(timeline.ranks)
    rows = max(8, min(60, len(requests)))
    figure = new_figure(14, 5 + 0.35 * len(ranks) + 0.11 * rows)
    ratios = [2.2, 1.6, 0.4 + 0.35 * max(1, len(ranks)), 0.11 * rows + 0.6]
    queues, pages, passes, lives = figure.subplots(4, 1, sharex=True, height_ratios=ratios)
    at = [point.at - timeline.began for point in timeline.loads] + [timeline.ended - timeline.began]
    points = [*timeline.loads, timeline.loads[-1]] if timeline.loads else []
    if points:
        queues.step(at, [point.waiting for point in points], where="post", color=LINES["waiting"], label="wait")
        queues.step(at, [point.running for point in points], where="post", color=LINES["running"], label="have pages")
        queues.legend(fontsize=8, loc="upper left")
        left = queues.twinx()
        left.step(at, [point.unplanned for point in points], where="post", color=TOKENS, linewidth=0.8)
        left.set_ylabel("tokens to plan", color=TOKENS, fontsize=8)
        used, leased = [point.used_pages for point in points], [point.leased_pages for point in points]
        pages.fill_between(at, used, step="post", color=USED, alpha=0.5, linewidth=0, label="cached")
        pages.fill_between(at, leased, step="post", color=LEASED, alpha=0.7, linewidth=0, label="leased")
        pages.set_ylim(0, max(1, timeline.pages) * 1.05)
        pages.legend(fontsize=8, loc="upper left")
    queues.set_ylabel("requests")
    pages.set_ylabel("KV pages")
    for place, rank in enumerate(ranks):
        for decodes, color in ((False, PREFILL), (True, DECODE)):
            found = [(one.start, one.end - one.start) for one in busy(timeline, rank) if one.decodes == decodes]
            passes.broken_barh(found, (place - 0.4, 0.8), color=color)
    passes.set_ylim(len(ranks) - 0.5, -0.5)
    passes.set_yticks(range(len(ranks)), [timeline.ranks[rank] for rank in ranks], fontsize=8)
    for row, bar in enumerate(requests):
        for phase, start, end in bar.spans:
            lives.broken_barh([(start, end - start)], (row - 0.45, 0.9), color=COLORS[phase])
    tokens = [(bar.first_token, row) for row, bar in enumerate(requests) if bar.first_token is not None]
    lives.scatter([x for x, _ in tokens], [y for _, y in tokens], s=4, color="black", zorder=3)
    failed = [(bar.failed, row) for row, bar in enumerate(requests) if bar.failed is not None]
    lives.scatter([x for x, _ in failed], [y for _, y in failed], s=14, marker="x", color=FAILED, zorder=3)
    lives.set_ylim(len(requests) - 0.5, -0.5)
    lives.set_ylabel(f"requests{f' (without {left_out:,} short ones)' if left_out else ''}")
    lives.set_xlabel("seconds")
    used = {phase for bar in requests for phase, _, _ in bar.spans}
    handles = [_patch(COLORS[phase], NAMES[phase]) for phase in COLORS if phase in used]
    lives.legend(handles=handles, fontsize=8, ncols=max(1, len(handles)), loc="lower left", bbox_to_anchor=(0, 1.0))
    for panel in (queues, pages, passes, lives):
        panel.grid(alpha=0.3, axis="x")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _patch(color: str, label: str) -> "Patch":
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


# --- HTML

WIDTH, LEFT, RIGHT = 1280, 150, 20
PANEL, GAP, RANK, BAR = 110, 34, 20, 9
STYLE = """
body { font: 13px/1.4 system-ui, sans-serif; margin: 1.5em; color: #1f2933; background: #fff }
svg text { font: 11px system-ui, sans-serif; fill: #52606d }
.axis { stroke: #cbd2d9; stroke-width: 1 } .line { fill: none; stroke-width: 1.3 }
.bar:hover { opacity: .7 } .key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em }
"""


def as_html(timeline: RecordedTimeline, title: str) -> str:
    """The picture as an HTML page."""
    requests, left_out = bars(timeline)
    svg = _Svg(timeline.ended - timeline.began)
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

    def __init__(self, seconds: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / (seconds or 1.0)
        self._seconds = seconds
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
            for one in busy(timeline, rank):
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
        ordered = [*points]
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
            found.append(f"L{self._x(self._seconds):.0f} {before:.1f}")
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
        step = next(size for size in _steps_of_time() if self._seconds / size <= 12)
        self.bottom += 4
        count = int(self._seconds / step)
        for number in range(count + 1):
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
        return LEFT + max(0.0, seconds) * self._scale


def _steps_of_time() -> Iterator[float]:
    """1, 2, 5, 10 …, from milliseconds on."""
    size = 0.001
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10
