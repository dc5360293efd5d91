"""Traces on demand: the scheduler's own recording, and the orders that have the stages record with it.

StartTrace ─► StartRecording to the stages (again to a group that comes up meanwhile) ··· EndTrace ─► Traced
                                                                                    └► StopRecording ─►
                                                                                    RecordingStopped ─► StageTraced
"""

from headrace.core.messages.frontend import EndTrace, StartTrace
from headrace.core.messages.orders import StartRecording, StopRecording
from headrace.core.messages.replies import StageTraced, Traced
from headrace.core.messages.stage_events import RecordingStopped
from headrace.scheduler.state.state import State
from headrace.scheduler.telemetry.trace_log import TraceLog


class Tracing:
    """At most one recording at a time."""

    def __init__(self, state: State) -> None:
        self._state = state

    def start(self, event: StartTrace, now: float) -> None:
        """Begin a recording; one that is under way is dropped."""
        self._state.metrics.trace = TraceLog(event.trace, now)
        self.stages_up()

    def stages_up(self) -> None:
        """Order the stages, if they are up, to record with us."""
        state, trace = self._state, self._state.metrics.trace
        if trace is not None and state.engine.ready:
            state.out.add(StartRecording(seq=state.out.next_seq(), trace=trace.trace))

    def end(self, event: EndTrace, now: float) -> None:
        """Report the recording, and order the stages to report theirs."""
        state, trace = self._state, self._state.metrics.trace
        if trace is None or trace.trace != event.trace:
            state.drop("unknown_trace")
            return
        state.metrics.trace = None
        if state.engine.ready:
            state.out.add(StopRecording(seq=state.out.next_seq(), trace=event.trace))
        requests = [(request, state.peer_of(request)) for request in state.requests]
        stages = len(state.engine.stages) if state.engine.ready else 0
        state.out.add(Traced(trace=event.trace, scheduler=trace.close(now, requests, state.config.layout, stages)))

    def recorded(self, event: RecordingStopped) -> None:
        """Pass a stage's recording on to the front end."""
        self._state.out.add(StageTraced(trace=event.trace, stage=event.stage, spans=event.spans))

    def observe(self, now: float) -> None:
        """Record the counts, if an event has changed them."""
        state = self._state
        if state.metrics.trace is not None:
            state.metrics.trace.load(now, state.plans_in_flight, tuple(state.phases.values()), state.unplanned)
