"""Recording on demand: the scheduler's own journal, and the orders that have the stages record with it.

StartTrace ─► Record to the stages (again to a group that comes up meanwhile) ··· EndTrace ─► Traced
                                                                                    └► Report ─► Recorded ─► StageTraced
"""

from core.intake import EndTrace, StageTraced, StartTrace, Traced
from core.orders import Record, Recorded, Report
from scheduler.journal import Journal
from scheduler.state import State


class Tracing:
    """At most one recording at a time; nothing is noted without one."""

    def __init__(self, state: State) -> None:
        self._state = state

    def start(self, event: StartTrace, now: float) -> None:
        state = self._state
        state.journal = Journal(event.trace, now)
        self.introduce()

    def introduce(self) -> None:
        """Have the stages record, if they are up and there is a recording."""
        state = self._state
        if state.journal is not None and state.ready:
            state.out.add(Record(seq=state.out.next_seq(), trace=state.journal.trace))

    def end(self, event: EndTrace, now: float) -> None:
        state, journal = self._state, self._state.journal
        if journal is None or journal.trace != event.trace:
            state.drop("unknown_trace")
            return
        state.journal = None
        if state.ready:
            state.out.add(Report(seq=state.out.next_seq(), trace=event.trace))
        requests = [(request, state.peer_of(request)) for request in state.records.values()]
        stages = state.config.stages if state.ready else 0
        state.out.add(Traced(trace=event.trace, scheduler=journal.close(now, requests, stages)))

    def recorded(self, event: Recorded) -> None:
        self._state.out.add(StageTraced(trace=event.trace, stage=event.stage, spans=event.spans))

    def observe(self, now: float) -> None:
        """Note the counts, after whatever may have changed them."""
        state = self._state
        if state.journal is not None:
            state.journal.load(now, len(state.plans), tuple(state.queue_requests.values()), state.unplanned)
