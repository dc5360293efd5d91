"""Chrome's Trace Event Format, which Perfetto and chrome://tracing read; the kinds of events that are used here:

M  names of processes and threads     X     a span on a thread's track      s, f  an arrow between two spans
C  counters                           b, e  a span on a track of its own    i     a moment
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Arguments = Mapping[str, object]


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of traceEvents, with the format's own field names."""

    name: str
    ph: str
    """Kind, see above."""
    pid: int
    tid: int
    ts: float | None = None
    """Microseconds since the trace began."""
    dur: float | None = None
    """Microseconds."""
    cat: str | None = None
    """Category."""
    id: int | None = None
    """Joins b with e, and s with f, within a category."""
    bp: str | None = None
    """Where an arrow ends: "e" for the enclosing span."""
    s: str | None = None
    """Scope of an instant: "t" for its thread."""
    args: Arguments | None = None


class TraceFile(msgspec.Struct, frozen=True, rename="camel"):
    """A whole trace: the format's object form."""

    trace_events: list[TraceEvent]
    other_data: Arguments
    display_time_unit: str = "ms"


class Track(msgspec.Struct, frozen=True):
    """A row of the display: a thread of a process."""

    pid: int
    tid: int


class TraceSpan(msgspec.Struct, frozen=True):
    """A named interval, in nanoseconds since the trace began."""

    name: str
    start: int
    end: int
    args: Arguments


class Timeline:
    """Collects the events of a trace. Times are nanoseconds since it began; earlier ones are cut off."""

    def __init__(self) -> None:
        self._names: list[TraceEvent] = []
        self._events: list[TraceEvent] = []
        self._ids = 0

    def process(self, pid: int, name: str) -> None:
        """Name a process; processes are shown in the order of their numbers."""
        self._names.append(TraceEvent(ph="M", name="process_name", pid=pid, tid=0, args={"name": name}))
        self._names.append(TraceEvent(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": pid}))

    def thread(self, track: Track, name: str) -> None:
        """Name a thread; threads are shown in the order of their numbers."""
        pid, tid = track.pid, track.tid
        self._names.append(TraceEvent(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": name}))
        self._names.append(TraceEvent(ph="M", name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": tid}))

    def span(self, track: Track, category: str, span: TraceSpan) -> None:
        """Add a span of a thread, which must not overlap others of the same thread."""
        if span.end > 0:
            start = max(0, span.start)
            duration = _microseconds(span.end - start)
            self._add(track, "X", span.name, start, cat=category, dur=duration, args=span.args)

    def lane(self, track: Track, category: str, span: TraceSpan, parts: Sequence[TraceSpan] = ()) -> None:
        """Add a span that may overlap others of its process. parts: its sub-spans, in order and without overlaps."""
        if span.end <= 0:
            return
        self._ids += 1
        self._add(track, "b", span.name, span.start, cat=category, id=self._ids, args=span.args)
        for part in parts:
            if part.end > 0:
                self._add(track, "b", part.name, part.start, cat=category, id=self._ids, args=part.args)
                self._add(track, "e", part.name, part.end, cat=category, id=self._ids)
        self._add(track, "e", span.name, span.end, cat=category, id=self._ids)

    def arrow(self, category: str, name: str, source: tuple[Track, int], target: tuple[Track, int]) -> None:
        """Add an arrow from the span that one track has at a time to the one that another track has. Both must have
        been added; if one lies before the trace, there is no arrow."""
        if min(source[1], target[1]) <= 0:
            return
        self._ids += 1
        self._add(source[0], "s", name, source[1], cat=category, id=self._ids)
        self._add(target[0], "f", name, target[1], cat=category, id=self._ids, bp="e")

    def counter(self, track: Track, name: str, at: int, values: Mapping[str, int]) -> None:
        """Add the values of a counter from this time on."""
        self._add(track, "C", name, at, args=values)

    def instant(self, track: Track, name: str, at: int) -> None:
        """Add an instant event with a note on a track."""
        self._add(track, "i", name, at, s="t")

    def encode(self, other: Arguments) -> bytes:
        """The trace as JSON, events in the order of their times."""
        self._events.sort(key=lambda event: event.ts or 0.0)  # stable: at the same moment, in the order of adding
        return msgspec.json.encode(TraceFile([*self._names, *self._events], other))

    def _add(self, track: Track, phase: str, name: str, at: int, **more: Any) -> None:
        """Add an event at a time. more: further fields of TraceEvent."""
        at = max(0, at)
        self._events.append(TraceEvent(ph=phase, name=name, pid=track.pid, tid=track.tid, ts=_microseconds(at), **more))


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
