"""A recording as a trace for Perfetto: every stage, request and transfer, on one clock.

scheduler     plans in flight ▁▃▅▅▃▁   queues ▁▂▂▁     a span per request, with its phases
stage 0       ├compute 1┤├compute 2┤
                       ╲           ╲                   hidden states
stage 1       ├ wait ───┤├compute 1┤├compute 2┤        a gap: no plan was there
                             └ chunk ───┘              sent to acknowledged
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from headrace.core.trace import (
    LoadSample,
    PhaseTrace,
    PlanTrace,
    RequestName,
    SchedulerTrace,
    StageTrace,
    TransferTrace,
)
from headrace.server.telemetry.trace_events import Arguments, Timeline, TraceSpan, Track
from headrace.server.telemetry.tracer import RecordedTrace

SAME_CLOCK_S = 0.05  # how well machines agree on the time of day; their monotonic clocks differ by far more
SCHEDULER = Track(1, 1)
FIRST_STAGE = 2  # its process number


def trace_json(recording: RecordedTrace, wall_offset_s: float, about: Arguments) -> bytes:
    """The JSON of a trace. wall_offset_s: headrace.core.runtime.clock.wall_offset() of the scheduler. about: added to
    otherData, beside notes on the recording."""
    scheduler = recording.scheduler
    decoder = msgspec.msgpack.Decoder(StageTrace)
    stages = {stage: decoder.decode(spans) for stage, spans in sorted(recording.stages.items())}
    timeline = Timeline()
    _draw_scheduler(timeline, scheduler)
    names = {name.serial: name for name in scheduler.names}
    width = scheduler.layout.dp * scheduler.layout.tp  # ranks of a stage
    drawn: dict[int, _Stage] = {}
    for rank, spans in stages.items():
        began = scheduler.started - _shift(spans.wall_offset_s - wall_offset_s)
        name, last = scheduler.layout.name(rank), rank >= scheduler.stages - width
        drawn[rank] = _Stage(timeline, rank, name, names, began, last=last)
        drawn[rank].draw(spans)
        if (before := drawn.get(rank - width)) is not None:
            _draw_arrows(timeline, before, drawn[rank])
    return timeline.encode({**about, **_notes(scheduler, stages, wall_offset_s)})


def _notes(scheduler: SchedulerTrace, stages: Mapping[int, StageTrace], wall_offset_s: float) -> Arguments:
    """Notes for otherData. started: seconds since 1970."""
    named = {scheduler.layout.name(stage): spans for stage, spans in stages.items()}
    dropped = {name: spans.dropped_plans + spans.dropped_transfers for name, spans in named.items()}
    offsets = {name: spans.wall_offset_s for name, spans in named.items()}
    return {
        "started": scheduler.started + wall_offset_s,
        "seconds": scheduler.ended - scheduler.started,
        "dropped": {"scheduler": scheduler.dropped, **dropped},
        "missing": [scheduler.layout.name(stage) for stage in range(scheduler.stages) if stage not in stages],
        "wall_offset_s": {"scheduler": wall_offset_s, **offsets},
    }


def _shift(difference_s: float) -> float:
    """Seconds to add to a process's monotonic clock to get the scheduler's. difference_s: of their offsets to the time
    of day; within a machine that is noise, and the clock is the same."""
    return 0.0 if abs(difference_s) < SAME_CLOCK_S else difference_s


def _nanoseconds(at: float, began: float) -> int:
    return round((at - began) * 1e9)


def _draw_scheduler(timeline: Timeline, scheduler: SchedulerTrace) -> None:
    timeline.process(SCHEDULER.pid, "scheduler")
    timeline.thread(SCHEDULER, "requests")
    names = {name.request: name for name in scheduler.names}
    phases: dict[int, list[PhaseTrace]] = {}
    for phase in scheduler.spans:
        phases.setdefault(phase.request, []).append(phase)
    for request, spans in phases.items():
        _draw_request(timeline, names.get(request), spans, scheduler.started)
    _draw_loads(timeline, scheduler.loads, scheduler.phases, scheduler.started)


def _draw_request(timeline: Timeline, name: RequestName | None, phases: list[PhaseTrace], began: float) -> None:
    """Add a span for the request with its phases as parts."""
    rid, ticket, peer = ("?", "", "") if name is None else (name.rid, name.ticket, name.peer)
    times = [(_nanoseconds(each.start, began), _nanoseconds(each.end, began)) for each in phases]
    parts = [TraceSpan(each.phase, *time, {"rid": rid}) for each, time in zip(phases, times, strict=True)]
    args = {"rid": rid, "ticket": ticket, "peer": peer, "outcome": phases[-1].then or "open"}
    timeline.lane(SCHEDULER, "request", TraceSpan(rid, times[0][0], times[-1][1], args), parts)


def _draw_loads(timeline: Timeline, loads: Iterable[LoadSample], phases: tuple[str, ...], began: float) -> None:
    """Add counters, each where it changes."""
    shown: dict[str, Mapping[str, int]] = {}
    for load in loads:
        at = _nanoseconds(load.at, began)
        for name, values in (
            ("plans in flight", {"plans": load.in_flight}),
            ("plans issued", {"plans": load.issued}),
            ("queues", dict(zip(phases, load.queues, strict=True))),
            ("unplanned tokens", {"tokens": load.unplanned}),
        ):
            if shown.get(name) != values:
                shown[name] = values
                timeline.counter(SCHEDULER, name, at, values)


class _Stage:
    """Draws one rank. began: the start of the trace on this stage's clock."""

    def __init__(
        self, timeline: Timeline, stage: int, name: str, names: Mapping[int, RequestName], began: float, *, last: bool
    ) -> None:
        self._name = name
        self.stage = stage
        self.compute, self.transfers = Track(FIRST_STAGE + stage, 1), Track(FIRST_STAGE + stage, 2)
        self.started: dict[int, int] = {}  # plan → when its layers began
        self.passed_on: dict[int, int] = {}  # plan → when its hidden states began to leave
        self._timeline = timeline
        self._names = names
        self._began = began
        self._steps = ("wait", "compute", "sample" if last else "pass on")

    def draw(self, spans: StageTrace) -> None:
        """Add the events of this stage."""
        timeline = self._timeline
        timeline.process(self.compute.pid, self._name)
        timeline.thread(self.compute, "compute")
        timeline.thread(self.transfers, "transfers")
        for plan in spans.plans:
            self._draw_plan(plan, self._at(spans.ended))
        for transfer in spans.transfers:
            self._draw_transfer(transfer)
        if spans.dropped_plans:
            last = max((plan.marks[-1] for plan in spans.plans), default=self._began)
            timeline.instant(self.compute, f"recording full, {spans.dropped_plans} more plans", self._at(last))
        if spans.dropped_transfers:
            last = max((transfer.ended for transfer in spans.transfers), default=self._began)
            timeline.instant(self.transfers, f"recording full, {spans.dropped_transfers} more chunks", self._at(last))

    def _draw_plan(self, plan: PlanTrace, ended: int) -> None:
        marks = [self._at(mark) for mark in plan.marks]
        finished = len(marks) > len(self._steps)
        edges = marks if finished else [*marks, max(marks[-1], ended)]
        args = self._plan_args(plan)
        spans = [TraceSpan(step, *edge, args) for step, edge in zip(self._steps, pairwise(edges), strict=False)]
        if not finished:
            spans[-1] = msgspec.structs.replace(spans[-1], args={**args, "unfinished": True})
        for span in spans:
            self._timeline.span(self.compute, "plan", span)
        if len(marks) > 1:
            self.started[plan.seq] = marks[1]
        if len(marks) > 2:
            self.passed_on[plan.seq] = marks[2]

    def _plan_args(self, plan: PlanTrace) -> Arguments:
        requests = [{"rid": self._rid(row.request), "start": row.start, "count": row.count} for row in plan.rows]
        tokens = sum(row.count for row in plan.rows)
        return {"plan": plan.seq, "rows": len(plan.rows), "tokens": tokens, "requests": requests}

    def _draw_transfer(self, transfer: TransferTrace) -> None:
        name = self._names.get(transfer.request)
        args = {
            "rid": self._rid(transfer.request),
            "ticket": transfer.ticket,
            "chunk": transfer.chunk,
            "bytes": transfer.bytes,
            "peer": name.peer if name is not None else "",
            "peer_stage": transfer.peer_stage,
            "outcome": transfer.outcome,
        }
        span = TraceSpan("chunk", self._at(transfer.sent), self._at(transfer.ended), args)
        self._timeline.lane(self.transfers, "transfer", span)

    def _rid(self, serial: int) -> str:
        name = self._names.get(serial)
        return name.rid if name is not None else f"request {serial}"

    def _at(self, time: float) -> int:
        return _nanoseconds(time, self._began)


def _draw_arrows(timeline: Timeline, source: _Stage, target: _Stage) -> None:
    """Add an arrow for every plan from one stage to the next."""
    for plan, left in source.passed_on.items():
        if (arrived := target.started.get(plan)) is not None:
            timeline.arrow("plan", "hidden states", (source.compute, left), (target.compute, arrived))
