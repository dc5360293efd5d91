"""The scheduler: events in, effects out; pure and deterministic.

Submit ─► admission ─► rendezvous (SendTo) ─► waiting ─► planner ─► Forward … PlanDone ─► generation
                │                                │                                          │
                └───────── FetchFrom ─────────► fetch ────────────────────────────────────► │
                                                                  handoff (SendTo) ◄────────┘
every request ends in completion
"""

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import (
    Abort,
    AddPrefill,
    Drain,
    Drained,
    EndTrace,
    QueryStats,
    RefuseTicket,
    ReleaseTicket,
    RemovePrefill,
    Shutdown,
    StageLost,
    StartTrace,
    StatsReply,
    Submit,
)
from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import ShutdownStage
from headrace.core.messages.peers import (
    EndPeer,
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import (
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    PeerLost,
    PlanDone,
    ReceiveCancelled,
    ReceiveFailed,
    ReceivePrepared,
    RecordingStopped,
    SendCancelled,
    SendFailed,
    SessionClosed,
    StageFailed,
    StageHeartbeat,
    StageReady,
)
from headrace.core.stats import Stats
from headrace.core.types.errors import CANCELLED, DRAINING, ErrorInfo
from headrace.scheduler.admission import Admission
from headrace.scheduler.batching.planner import Planner
from headrace.scheduler.batching.stages import StageGroup
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.lifecycle import integrity
from headrace.scheduler.lifecycle.completion import Completion, release
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.state.deadlines import Key, Timer
from headrace.scheduler.state.events import Effect, Event
from headrace.scheduler.state.state import State
from headrace.scheduler.telemetry.statistics import snapshot
from headrace.scheduler.telemetry.tracing import Tracing

__all__ = ["Effect", "Event", "Scheduler"]


class Scheduler:
    """Decides for one server, whatever its role. Time is an argument, in seconds on any monotonic scale.

    Feed every event to handle(), then call plan() until it returns nothing; call tick() at next_deadline(). Effects
    are to be applied in the order in which they are returned. Raises ConfigError for an unknown policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._state = State(config)
        self._completion = Completion(self._state)
        self._holding = HeldRequests(self._state, self._completion)
        self._handoff = KvHandoff(self._state, self._completion, self._holding)
        self._rendezvous = Rendezvous(self._state, self._completion, self._handoff)
        self._admission = Admission(self._state, self._rendezvous)
        self._generate = TokenGeneration(self._state, self._completion, self._handoff)
        self._fetch = RemoteFetch(self._state, self._completion, self._generate)
        self._planner = Planner(self._state, self._generate, self._handoff, self._fetch)
        self._stages = StageGroup(self._state, self._completion, self._generate)
        self._tracing = Tracing(self._state)
        self._drained = False
        self._problems: list[str] = []

    @property
    def idle(self) -> bool:
        """No request is left, not even its pages."""
        return not self._state.records

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what is to be done about it."""
        self._dispatch(event, now)
        return self._conclude(now)

    def plan(self, now: float) -> list[Effect]:
        """At most one Forward and what belongs to it; nothing when there is nothing to do or no credit left."""
        self._planner.plan(now)
        return self._conclude(now)

    def tick(self, now: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        for timer, key in self._state.deadlines.due(now):
            self._expire(timer, key, now)
        return self._conclude(now)

    def next_deadline(self) -> float | None:
        """When tick() wants to be called."""
        return self._state.deadlines.next()

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when nothing is. Takes time in proportion to all that is held."""
        self._problems = integrity.check(self._state)
        return list(self._problems)

    def statistics(self) -> Stats:
        return snapshot(self._state, len(self._problems))

    def _dispatch(self, event: Event, now: float) -> None:
        state = self._state
        match event:
            case Submit():
                self._admission.submit(event, now)
            case PlanDone():
                self._stages.done(event, now)
            case ChunkAcked():
                self._handoff.acked(event, now)
            case SendCancelled() | ReceiveCancelled():
                self._answered(event)
            case SendFailed():
                self._handoff.send_failed(event, now)
            case PeerLost():
                state.out.add(EndPeer(session=event.session, reason=f"stage {event.stage}: {event.reason}"))
            case ReceivePrepared():
                self._fetch.expecting(event)
            case ChunkReceived():
                self._fetch.chunk_arrived(event)
            case KvReceived():
                self._fetch.arrived(event, now)
            case ReceiveFailed():
                self._fetch.fetch_failed(event, now)
            case PeerReserved():
                self._rendezvous.reserved(event, now)
            case PeerRenewed():
                self._holding.renewed(event, now)
            case PeerReleased():
                self._holding.released(event, now)
            case PeerCancelled():
                self._rendezvous.cancelled(event, now)
            case PeerJoined():
                self._rendezvous.joined(event, now)
            case PeerGone():
                self._rendezvous.gone(event, now)
            case TicketFailed():
                self._fetch.ticket_failed(event, now)
            case TicketFinished():
                self._fetch.ticket_finished(event, now)
            case PrefillUp():
                self._fetch.up(event, now)
            case PrefillDown():
                self._fetch.down(event, now)
            case Abort():
                self._abort(event, now)
            case RefuseTicket():
                self._rendezvous.refuse(event.ticket, event.error)
            case ReleaseTicket():
                release(state, event.prefill, event.ticket, event.reason)
            case AddPrefill():
                self._fetch.add(event)
            case RemovePrefill():
                self._fetch.remove(event, now)
            case StageReady():
                if self._stages.ready(event, now):
                    self._rendezvous.introduce()
                    self._fetch.introduce()
                    self._tracing.introduce()
            case JoinProgress():
                self._stages.gathering(event)
            case StageFailed() | StageLost():
                self._stages.failed(event.stage, event.message, now)
            case QueryStats():
                if self.idle:
                    self.check_integrity()
                state.out.add(StatsReply(token=event.token, stats=self.statistics()))
            case StartTrace():
                self._tracing.start(event, now)
            case EndTrace():
                self._tracing.end(event, now)
            case RecordingStopped():
                self._tracing.recorded(event)
            case Drain():
                self._drain(now)
            case Shutdown():
                self._shutdown(now)
            case TicketCancelled():
                self._fetch.ticket_cancelled(event)
            case SessionClosed():
                self._fetch.hung_up(event)
            case StageHeartbeat():
                pass  # the loop keeps the stages' counters; pages come back with ReceiveCancelled, not with Cancelled

    def _conclude(self, now: float) -> list[Effect]:
        """What any change may have made possible."""
        state = self._state
        self._rendezvous.promote(now)
        self._planner.start(None, now)
        self._tracing.observe(now)
        if state.draining and not self._drained and self.idle:
            self._drained = True
            state.out.add(Drained())
        if state.journal is not None:
            for event in state.journal.take():
                state.out.add(event)
        return state.out.take()

    def _answered(self, event: SendCancelled | ReceiveCancelled) -> None:
        request = self._state.records.get(event.request)
        if request is None:
            self._state.drop("unknown_request")
        else:
            self._completion.answered(request, event.stage)

    def _abort(self, event: Abort, now: float) -> None:
        request = self._state.rids.get(event.rid)
        if request is None:
            self._state.drop("unknown_rid")
        elif event.finish and request.decodes_here:
            self._completion.complete(request, "stop", now)
        else:
            error = event.error or ErrorInfo(code=CANCELLED, message="the request was cancelled", status=499)
            self._completion.fail(request, error, now)

    def _drain(self, now: float) -> None:
        """Requests that only a lease keeps are not waited for."""
        error = ErrorInfo(code=DRAINING, message="the server is draining", status=503, retry_after_s=1.0)
        self._state.draining = True
        self._stages.announce("draining")
        self._rendezvous.drop_reservations(error)
        self._holding.drop_all(error, now)

    def _shutdown(self, now: float) -> None:
        state = self._state
        error = ErrorInfo(code="shutdown", message="the server is shutting down", status=503)
        state.draining = True
        self._rendezvous.drop_reservations(error)
        self._stages.stop(error, now)
        self._stages.announce("shutdown")
        state.out.add(ShutdownStage(seq=state.out.next_seq()))

    def _expire(self, timer: Timer, key: Key, now: float) -> None:
        if timer is Timer.PLAN:
            self._stages.plan_timed_out(now)
            return
        if isinstance(key, str):
            self._rendezvous.reservation_timed_out(key)
            return
        request = self._state.arrivals.get(key)
        if request is None:
            return
        match timer:
            case Timer.BOOTSTRAP:
                self._rendezvous.request_timed_out(request, now)
            case Timer.TRANSFER:
                self._handoff.timed_out(request, now)
            case Timer.LEASE:
                self._holding.expired(request, now)
            case Timer.ANSWER:
                self._stages.answer_timed_out(request, now)
            case _:
                text = f"not done within the deadline of {request.submit.deadline_s:g} s"
                self._completion.fail(request, ErrorInfo(code="deadline_exceeded", message=text, status=504), now)
