"""Recording on demand: the scheduler's own log, and the orders that have the stages record with it.

StartTrace ─► StartRecording to the stages (again to a group that comes up meanwhile) ··· EndTrace ─► Traced
                                                                                    └► StopRecording ─►
                                                                                    RecordingStopped ─► StageTraced
"""

from headrace.core.messages.frontend import EndTrace, StageTraced, StartTrace, Traced
from headrace.core.messages.orders import StartRecording, StopRecording
from headrace.core.messages.stage_events import RecordingStopped
from headrace.scheduler.state.state import State
from headrace.scheduler.state.trace_log import TraceLog


class Tracing:
    """At most one recording at a time; nothing is noted without one."""

    def __init__(self, state: State) -> None:
        self._state = state

    def start(self, event: StartTrace, now: float) -> None:
        state = self._state
        state.trace_log = TraceLog(event.trace, now)
        self.introduce()

    def introduce(self) -> None:
        """Have the stages record, if they are up and there is a recording."""
        state = self._state
        if state.trace_log is not None and state.ready:
            state.out.add(StartRecording(seq=state.out.next_seq(), trace=state.trace_log.trace))

    def end(self, event: EndTrace, now: float) -> None:
        state, log = self._state, self._state.trace_log
        if log is None or log.trace != event.trace:
            state.drop("unknown_trace")
            return
        state.trace_log = None
        if state.ready:
            state.out.add(StopRecording(seq=state.out.next_seq(), trace=event.trace))
        requests = [(request, state.peer_of(request)) for request in state.records.values()]
        stages = state.config.stages if state.ready else 0
        state.out.add(Traced(trace=event.trace, scheduler=log.close(now, requests, stages)))

    def recorded(self, event: RecordingStopped) -> None:
        self._state.out.add(StageTraced(trace=event.trace, stage=event.stage, spans=event.spans))

    def observe(self, now: float) -> None:
        """Note the counts, after whatever may have changed them."""
        state = self._state
        if state.trace_log is not None:
            state.trace_log.load(now, len(state.plans), tuple(state.queue_requests.values()), state.unplanned)
