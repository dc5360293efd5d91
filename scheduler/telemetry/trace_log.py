"""The scheduler's part of a trace: phases as requests leave them, and its counts whenever they change."""

from collections.abc import Iterable, Sequence

from headrace.core.trace import Buffer, LoadSample, PhaseTrace, RequestName, SchedulerTrace
from headrace.core.types.ranks.layout import Layout
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.telemetry.metrics import QUEUES

MAX_SPANS = 100_000
MAX_LOADS = 100_000


class TraceLog:
    """One recording, until close(). Buffers are bounded; what does not fit is counted as dropped."""

    def __init__(self, trace: int, now: float) -> None:
        self.trace = trace
        self._started = now
        self._names: dict[int, RequestName] = {}  # by serial
        self._spans: Buffer[PhaseTrace] = Buffer(MAX_SPANS)
        self._loads: Buffer[LoadSample] = Buffer(MAX_LOADS)
        self._spans.start()
        self._loads.start()
        self._issued = 0
        self._last: tuple[int, int, tuple[int, ...], int] | None = None

    def phase(self, request: Request, phase: Phase, since: float, now: float, peer: str) -> None:
        """A request has left a phase, for the one it is in."""
        self._spans.add(PhaseTrace(request.arrival, phase.value, since, now, request.phase.value))
        self._name(request, peer)

    def issued(self) -> None:
        """A plan was ordered."""
        self._issued += 1

    def load(self, now: float, in_flight: int, queues: Sequence[int], unplanned: int) -> None:
        """Record the counts as of now, if they have changed."""
        counts = (in_flight, self._issued, tuple(queues), unplanned)
        if counts != self._last:
            self._last = counts
            self._loads.add(LoadSample(now, *counts))

    def close(self, now: float, requests: Iterable[tuple[Request, str]], layout: Layout, stages: int) -> SchedulerTrace:
        """The recording. requests: all known ones, with their peers' names; stages: how many of the
        layout's ranks will report."""
        for request, peer in requests:
            self._name(request, peer)
            if not request.ended:
                self._spans.add(PhaseTrace(request.arrival, request.phase.value, request.since, now, ""))
        spans, dropped_spans = self._spans.stop()
        loads, dropped_loads = self._loads.stop()
        return SchedulerTrace(
            started=self._started,
            ended=now,
            stages=stages,
            layout=layout,
            names=tuple(self._names.values()),
            spans=spans,
            phases=tuple(phase.value for phase in QUEUES),
            loads=loads,
            dropped=dropped_spans + dropped_loads,
        )

    def _name(self, request: Request, peer: str) -> None:
        """Record the names of a request, under the serial that it has now."""
        serial = request.serial
        if serial in self._names or len(self._names) < MAX_SPANS:
            self._names[serial] = RequestName(serial, request.arrival, request.rid, request.ticket, peer)
