"""The scheduler: events in, effects out; pure and deterministic.

Submit ─► admission ─► rendezvous (SendTo) ─► waiting ─► planner ─► Forward … PlanDone ─► generation
                │                                │                                          │
                └───────── FetchFrom ─────────► fetch ────────────────────────────────────► │
                                                                  handoff (SendTo) ◄────────┘
Every request ends in completion.
"""

from headrace.core.config import SchedulerConfig
from headrace.core.messages.forecasts import ForecastMade
from headrace.core.messages.frontend import (
    Abort,
    AddPrefill,
    AnyFrontendRequest,
    Drain,
    EndTrace,
    KvHint,
    ListKvFiles,
    QueryForecast,
    QueryPrefix,
    QueryStats,
    QueryStatus,
    RefuseTicket,
    ReleaseTicket,
    RemovePrefill,
    Shutdown,
    StageLost,
    StartTrace,
    Submit,
)
from headrace.core.messages.kv_events import ReplicaKvEvent
from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.peers import (
    PeerCancelled,
    PeerEvent,
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
from headrace.core.messages.replies import ForecastReply, PrefixReply, StatsReply, StatusReply
from headrace.core.messages.stage_events import (
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    PagesFound,
    PagesLoaded,
    PagesLost,
    PagesStored,
    PeerLost,
    PlanDone,
    ReceiveCancelled,
    ReceiveFailed,
    ReceivePrepared,
    RecordingStopped,
    SendCancelled,
    SendFailed,
    SessionClosed,
    StageEvent,
    StageFailed,
    StageHeartbeat,
    StageLoading,
    StageProgress,
    StageReady,
    StageSilence,
)
from headrace.core.stats import Stats
from headrace.core.types import refusals
from headrace.core.types.errors import CANCELLED, DEADLINE, ErrorInfo
from headrace.scheduler.admission import Admission
from headrace.scheduler.batching.kv_library import KvLibrary
from headrace.scheduler.batching.open_prompts import OpenPieces
from headrace.scheduler.batching.page_copies import PageCopies
from headrace.scheduler.batching.planner import LockstepPlanner, Planner
from headrace.scheduler.batching.stages import StageGroup
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.decode.prefill_sessions import PrefillSessions
from headrace.scheduler.draining import Draining
from headrace.scheduler.hints import KvHints
from headrace.scheduler.lifecycle import integrity
from headrace.scheduler.lifecycle.completion import Completion, release_ticket
from headrace.scheduler.lifecycle.integrity import IdleCheck
from headrace.scheduler.lifecycle.preemption import Preemption
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.prefill.prefix_handover import PrefixHandover
from headrace.scheduler.prefill.rendezvous import Rendezvous
from headrace.scheduler.queues.deadlines import (
    AnswerTimer,
    AnyRequestTimer,
    BootstrapTimer,
    CopyTimer,
    DrainTimer,
    LeaseTimer,
    LeftoverTimer,
    OrderTimer,
    PlanTimer,
    RequestTimer,
    ReservationTimer,
    Timer,
    TransferTimer,
)
from headrace.scheduler.reporting.status import forecast, prefix, snapshot, status
from headrace.scheduler.reporting.tracing import Tracing
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.events import Effect, Event
from headrace.scheduler.state.state import State

__all__ = ["Effect", "Event", "Scheduler"]


class Scheduler:
    """Decides for one server, whatever its role. Time is an argument, in seconds on any monotonic scale.

    Feed every event to handle(), then call plan() until it returns nothing; call tick() at next_deadline(). Effects
    are to be applied in the order in which they are returned. Raises ConfigError for an unknown policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._state = state = State(config)
        self._completion = Completion(state)
        self._holding = HeldRequests(state, self._completion)
        self._handoff = KvHandoff(state, self._completion, self._holding)
        self._rendezvous = Rendezvous(state, self._completion, self._handoff)
        self._handover = PrefixHandover(state, self._completion, self._handoff)
        self._admission = Admission(state, self._completion, self._rendezvous, self._handover)
        self._preemption = Preemption(state, self._completion)
        self._generation = TokenGeneration(state, self._completion, self._handoff, self._preemption)
        self._fetch = RemoteFetch(state, self._completion, self._generation)
        self._prefills = PrefillSessions(state, self._completion)
        self._open_prompts = [OpenPieces(state, replica, self._completion) for replica in state.replicas]
        self._planners = [
            Planner(state, replica, self._generation, self._handoff, self._fetch, self._preemption, open_prompts)
            for replica, open_prompts in zip(state.replicas, self._open_prompts, strict=True)
        ]
        self._lockstep = LockstepPlanner(state, self._planners) if config.lockstep and config.dp > 1 else None
        self._turn = 0  # the replica that is planned first
        self._stages = StageGroup(state, self._completion, self._generation)
        self._copies = [PageCopies(state, replica, self._completion, self._handover) for replica in state.replicas]
        self._library = KvLibrary(state)
        self._tracing = Tracing(state)
        self._hints = KvHints(state)
        self._draining = Draining(state, self._rendezvous, self._stages)
        self._problems: list[str] = []
        self._idle_check = IdleCheck()

    @property
    def state(self) -> State:
        """What it knows: for those who explain what it has decided, and change nothing of what it will decide; and for
        the twin, a copy."""
        return self._state

    @property
    def idle(self) -> bool:
        """No request is left, and no page is leased."""
        return not self._state.requests

    @property
    def problems(self) -> list[str]:
        """Discrepancies that the last integrity check has found."""
        return self._problems

    def cached_tokens(self, prompt: bytes, salt: str = "") -> int:
        """Leading tokens of a packed prompt whose KV the prefix cache of a replica holds now."""
        return max(replica.cache.cached_positions(prompt, salt) for replica in self._state.replicas)

    def prefix(self, prompt: bytes, salt: str = "") -> PrefixReply:
        """What the replicas have of a packed prompt, as POST /v1/prefixes tells it."""
        return prefix(self._state, QueryPrefix(token=0, prompt=prompt, salt=salt))

    def load(self, now: float) -> tuple[float, tuple[float, float], bool, tuple[tuple[int, float, float], ...]]:
        """Predicted seconds of computing what is admitted and not planned, the cost per squared token and per token by
        which they are predicted, whether both are to be trusted, and how long prompts would wait and how many requests
        one would delay (State.waits)."""
        state, costs = self._state, self._state.replicas[0].costs
        return state.unplanned_s, costs.per_token, state.costs_trusted, state.waits(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what is to be done about it."""
        if not isinstance(
            event, QueryStats | QueryStatus | QueryPrefix | QueryForecast | ForecastMade | StageHeartbeat
        ):
            self._idle_check.changed()
        self._expire_retained(now)
        match event:
            case PeerEvent():
                self._peer_event(event, now)
            case StageEvent():
                self._stage_event(event, now)
            case JoinProgress():
                self._stages.gathering(event)
            case ForecastMade():
                self._state.promises.made(event.forecast)
            case _:
                self._front_end_request(event, now)
        return self._conclude(now)

    def plan(self, now: float) -> list[Effect]:
        """At most one Forward of each replica, and what belongs to it; nothing without work, or a credit left."""
        self._expire_retained(now)
        if self._lockstep is not None:
            self._lockstep.plan(now)
        else:
            self._turn = (self._turn + 1) % len(self._planners)  # replicas share the metadata rows
            for planner in (*self._planners[self._turn :], *self._planners[: self._turn]):
                planner.plan(now)
        return self._conclude(now)

    def tick(self, now: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        for timer in self._state.deadlines.due(now):
            self._idle_check.changed()
            self._expire(timer, now)
        return self._conclude(now)

    def next_deadline(self) -> float | None:
        """When to call tick()."""
        return self._state.deadlines.next()

    def check_integrity(self) -> list[str]:
        """Discrepancies in the state; empty when there are none. Takes time in proportion to all that is held."""
        self._problems = integrity.check(self._state)
        self._idle_check.checked(clean=not self._problems)
        return list(self._problems)

    def statistics(self, now: float) -> Stats:
        """The scheduler's metrics."""
        return snapshot(self._state, len(self._problems), now)

    def _front_end_request(self, event: AnyFrontendRequest, now: float) -> None:
        match event:
            case Submit():
                self._admission.submit(event, now)
            case Abort():
                self._abort(event, now)
            case KvHint():
                self._hints.handle(event, now)
            case RefuseTicket():
                self._rendezvous.refuse(event.ticket, event.error)
            case ReleaseTicket():
                release_ticket(self._state, event.prefill, event.ticket, event.reason)
            case AddPrefill():
                self._prefills.add(event)
            case RemovePrefill():
                self._prefills.remove(event, now)
            case StageLost():
                self._stages.stage_failed(event.stage, event.message, now)
            case QueryStats():
                if self.idle and self._idle_check.due(sum(replica.cache.total for replica in self._state.replicas)):
                    self.check_integrity()
                self._state.promises.ask()
                self._state.out.add(StatsReply(token=event.token, stats=self.statistics(now)))
            case QueryStatus():
                self._state.out.add(StatusReply(token=event.token, status=status(self._state, event.requests, now)))
            case QueryPrefix():
                self._state.out.add(prefix(self._state, event))
            case QueryForecast():
                self._state.promises.ask()
                self._state.out.add(ForecastReply(token=event.token, report=forecast(self._state, now)))
            case StartTrace():
                self._tracing.start(event, now)
            case EndTrace():
                self._tracing.end(event, now)
            case ListKvFiles():
                self._library.listed(event)
            case Drain():
                self._draining.begin()
                for pieces in self._open_prompts:
                    pieces.give_way()
                for request in [each for each in self._state.requests if each.open and not each.ended]:
                    self._open_prompts[request.replica].finish(request, now)
                for replica in self._state.replicas:
                    self._completion.end_moves(replica, refusals.DRAINING.error(), now)
            case Shutdown():
                self._draining.shut_down(now)

    def _stage_event(self, event: StageEvent, now: float) -> None:
        match event:
            case PlanDone():
                self._stages.plan_done(event, now)
            case ChunkAcked():
                self._handoff.acked(event, now)
            case SendCancelled() | ReceiveCancelled():
                self._stage_stopped(event)
            case SendFailed():
                self._handoff.send_failed(event, now)
            case PeerLost():
                self._stages.peer_lost(event)
            case ReceivePrepared():
                self._fetch.receive_prepared(event)
            case ChunkReceived():
                self._fetch.chunk_received(event)
            case KvReceived():
                self._fetch.kv_received(event, now)
            case ReceiveFailed():
                self._fetch.receive_failed(event, now)
            case SessionClosed():
                self._fetch.session_closed(event)
            case StageLoading():
                self._stages.loading(event)
            case StageReady():
                if self._stages.stage_ready(event, now):
                    self._rendezvous.stages_up()
                    self._prefills.stages_up()
                    self._tracing.stages_up()
                    self._library.stages_up()
                    for copies in self._copies:
                        copies.restore()
            case PagesStored() | PagesLoaded() | PagesLost() | PagesFound():
                self._copies[self._state.with_rank(event.stage).index].take(event, now)
            case StageFailed():
                self._stages.stage_failed(event.stage, event.message, now, elsewhere=event.elsewhere)
            case StageProgress():
                self._stages.progressed(event.stage, now)
            case StageSilence():
                self._stages.silent(event, now)
            case RecordingStopped():
                self._tracing.recorded(event)
            case _:
                pass  # StageHeartbeat: the loop keeps the stages' counters

    def _peer_event(self, event: PeerEvent, now: float) -> None:
        match event:
            case PeerJoined():
                self._rendezvous.joined(event, now)
            case PeerGone():
                self._rendezvous.gone(event, now)
            case PeerReserved():
                self._rendezvous.reserved(event, now)
            case PeerCancelled():
                self._rendezvous.cancelled(event, now)
            case PeerRenewed():
                self._holding.renewed(event, now)
            case PeerReleased():
                self._holding.released(event, now)
            case PrefillUp():
                self._prefills.up(event, now)
            case PrefillDown():
                self._prefills.down(event, now)
            case TicketFailed():
                self._fetch.ticket_failed(event, now)
            case TicketFinished():
                self._fetch.ticket_finished(event, now)
            case TicketCancelled():
                self._fetch.ticket_cancelled(event, now)

    def _conclude(self, now: float) -> list[Effect]:
        """Do what any change may have made possible; return the effects of the event."""
        state = self._state
        self._preemption.restart(now)
        self._rendezvous.give_out_rows(now)
        self._rendezvous.let_in(now)
        for planner in self._planners:
            planner.start(now)
        for copies in self._copies:
            copies.order(now)
        self._tracing.observe(now)
        self._draining.check(now)
        if state.promises:
            self._keep_promises(now)
        for replica in state.replicas:
            if replica.cache_events is not None:
                for event in replica.cache_events.take():
                    state.out.add(ReplicaKvEvent(replica=replica.index, event=event) if replica.index else event)
        return state.out.take()

    def _keep_promises(self, now: float) -> None:
        """Count those that are broken by now, and order the next forecast if it is due."""
        promises = self._state.promises
        promises.expire(self._state.requests.by_arrival, now)
        if self._state.engine.ready and (order := promises.begin(now)) is not None:
            self._state.out.add(order)

    def _expire_retained(self, now: float) -> None:
        """No deadline is set for pages that are retained: it matters only when others come."""
        for replica in self._state.replicas:
            if replica.cache.retained:
                replica.cache.expire(now)

    def _stage_stopped(self, event: SendCancelled | ReceiveCancelled) -> None:
        request = self._state.requests.by_serial(event.request)
        if request is None:
            self._state.drop("unknown_request")
        else:
            self._completion.stage_stopped(request, event.stage)

    def _abort(self, event: Abort, now: float) -> None:
        state = self._state
        request = state.requests.live(event.rid)
        if request is None:
            self._completion.abort_left(event.rid, event.error)
        elif event.finish and request.decodes_here:
            self._completion.complete(request, "stop", now)
        elif event.finish and request.open:
            self._open_prompts[request.replica].finish(request, now)
        elif event.error is not None and event.error.at_prefill and request.needs_no_prefill:
            state.drop("late_error")  # all of the KV is here
        else:
            error = event.error or ErrorInfo(code=CANCELLED, message="the request was cancelled", status=499)
            self._completion.fail(request, error, now)

    def _expire(self, timer: Timer, now: float) -> None:
        match timer:
            case OrderTimer() | DrainTimer():
                pass  # plan() comes after every tick, and so does the end of a drain
            case PlanTimer(replica):
                self._stages.plan_timed_out(replica, now)
            case CopyTimer(replica):
                text = f"no copy of KV pages has ended in {self._state.config.stage_timeout_s:g} s"
                self._stages.stage_failed(self._state.replicas[replica].copies.silent(), text, now)
            case ReservationTimer(ticket):
                self._rendezvous.reservation_timed_out(ticket)
            case _:
                request = self._state.requests.by_arrival(timer.arrival)
                if request is not None:
                    self._request_expired(timer, request, now)

    def _request_expired(self, timer: AnyRequestTimer, request: Request, now: float) -> None:
        match timer:
            case BootstrapTimer():
                self._rendezvous.request_timed_out(request, now)
            case TransferTimer():
                self._handoff.timed_out(request, now)
            case LeaseTimer():
                self._holding.expired(request, now)
            case LeftoverTimer():
                self._completion.leftover_expired(request, now)
            case AnswerTimer():
                if not self._handoff.waits_for_peer(request, now):
                    self._stages.answer_timed_out(request, now)
            case RequestTimer():
                text = f"not done within the deadline of {request.terms.deadline_s:g} s"
                self._completion.fail(request, ErrorInfo(code=DEADLINE, message=text, status=504), now)
