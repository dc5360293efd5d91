"""The end of the server's work: a drain, which lets requests end, and a shutdown, which ends them."""

from headrace.core.messages.orders import ShutdownStage
from headrace.core.messages.replies import Drained
from headrace.core.types import refusals
from headrace.scheduler.batching.stages import StageGroup
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.queues.deadlines import DrainTimer
from headrace.scheduler.state.state import State


class Draining:
    """Ends the work once; Drained is sent once."""

    def __init__(self, state: State, rendezvous: Rendezvous, stages: StageGroup) -> None:
        self._state = state
        self._rendezvous = rendezvous
        self._stages = stages
        self._drained = False

    def begin(self) -> None:
        """Refuse new requests, and prompts for which peers have reserved pages. A held request is waited for as long as
        its lease lasts: its client was answered, and sends a peer for it."""
        self._state.draining = True
        self._stages.announce("draining")
        self._rendezvous.drop_reservations(refusals.DRAINING.error())

    def check(self, now: float) -> None:
        """The drain is over when no request is left, and no peer comes for a first token any more, either."""
        state = self._state
        if not state.draining or self._drained or state.requests:
            return
        until = state.tickets.first_tokens_until(now)
        if until > now:
            state.deadlines.set(DrainTimer(), until)
            return
        self._drained = True
        state.out.add(Drained())

    def shut_down(self, now: float) -> None:
        """End every request, and the stages."""
        state = self._state
        error = refusals.SHUTDOWN.error()
        state.draining = True
        self._rendezvous.drop_reservations(error)
        self._stages.stop(error, now)
        self._stages.announce("shutdown")
        state.out.add(ShutdownStage(seq=state.out.next_seq()))
