"""What a recording holds of requests, passes and queues over time, gathered while it is played."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import CancelForward, Forward, PlanRow, ReplicaOrder
from headrace.core.messages.replies import Held, RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import PlanDone
from headrace.core.types.errors import CANCELLED
from headrace.core.types.packed import packed_length
from headrace.scheduler.recording.file import Call, Recording
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.scheduler.state.state import State
from headrace.scheduler.telemetry.measurements import Measurements
from headrace.tools.replay.playback import Playback, Progress, nobody


class WatchedMeasurements(Measurements):
    """The scheduler's measurements, which tell of every phase that a request leaves."""

    def __init__(self, of: Measurements, told: Callable[[Request, Phase, float, float], None]) -> None:
        """told: is given the request, the phase that it has left, when it had entered that, and now."""
        vars(self).update(vars(of))
        self._told = told

    def phase_left(self, request: Request, left: Phase, since: float, now: float, peer: str) -> None:
        """Measure it, and tell of it."""
        super().phase_left(request, left, since, now, peer)
        self._told(request, left, since, now)


class PhaseSpan(NamedTuple):
    """A phase of a request."""

    phase: Phase
    start: float
    end: float


@dataclass(slots=True, eq=False)
class RequestLife:
    """One request of a recording. Times are those of the recording's calls."""

    submit: Submit
    arrived: float
    known_before: bool = False
    """It was here when the recording began."""

    phases: list[PhaseSpan] = field(default_factory=list)
    first_token: float | None = None
    tokens: int = 0
    """Generated in the recording."""

    cached_tokens: int = 0
    cancelled: float | None = None
    """When its client gave it up, as far as that was told."""

    ended: float | None = None
    """None: it is open at the end of the recording."""

    outcome: str = ""
    """Why it has finished, or the code of its error; "" while it is open."""

    failed: bool = False

    def seconds(self, phase: Phase) -> float:
        """Seconds that it has spent in a phase."""
        return sum(span.end - span.start for span in self.phases if span.phase is phase)

    @property
    def rid(self) -> str:
        """The id that its client knows it by."""
        return self.submit.rid

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt."""
        return packed_length(self.submit.prompt)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to its first token; None where there was none in the recording, or the one of a
        request that was here before may have come earlier."""
        return None if self.first_token is None or self.known_before else self.first_token - self.arrived


class RankPass(NamedTuple):
    """A forward pass on one rank."""

    rank: int
    seq: int
    start: float
    """Not before the end of the pass before, as reports may be late."""

    end: float
    """When its report came."""

    seconds: float
    """Of computing."""

    ordered: float
    rows: tuple[PlanRow, ...]
    """Empty for one that was cancelled, or was ordered before the recording began."""

    @property
    def tokens(self) -> int:
        """That it has computed."""
        return sum(row.count for row in self.rows)

    @property
    def decodes(self) -> int:
        """Rows that go on behind their prompt."""
        return sum(row.generated > 0 and row.count == 1 for row in self.rows)


class LoadPoint(NamedTuple):
    """Counts of the scheduler from a point in time on."""

    at: float
    waiting: int
    """Requests that wait for a peer, or to be computed."""

    running: int
    """Requests that have pages and are not done."""

    unplanned: int
    """Prompt tokens that are in no pass yet."""

    leased_pages: int
    """That requests have, of all pools."""

    used_pages: int
    """The same, and those that are cached."""

    in_flight: int
    """Passes that were ordered and are not done."""


@dataclass(slots=True, eq=False)
class RecordedTimeline:
    """A whole recording."""

    began: float
    ended: float
    lives: list[RequestLife]
    """In the order of arrival."""

    passes: list[RankPass]
    loads: list[LoadPoint]
    ranks: dict[int, str]
    """Names of the ranks that have computed passes."""

    credits: int
    pages: int
    """Of all pools, as they were at the end."""


class _Gathering:
    """Follows one playback to its end."""

    def __init__(self) -> None:
        self.lives: list[RequestLife] = []
        self._open: dict[str, RequestLife] = {}  # by rid
        self.passes: list[RankPass] = []
        self.loads: list[LoadPoint] = []
        self._ordered: dict[
            tuple[int, int], tuple[float, tuple[PlanRow, ...]]
        ] = {}  # by replica and number of the pass
        self._cancelled: set[tuple[int, int]] = set()
        self._ends: dict[int, float] = {}  # of the last pass of each rank
        self._state: State | None = None

    def adopt(self, scheduler: Scheduler) -> None:
        """A Scheduler was restored."""
        self._state = state = scheduler.state
        state.metrics = WatchedMeasurements(state.metrics, self._left)
        for request in state.requests:
            if not request.ended and request.rid not in self._open:
                life = RequestLife(request.submit, request.arrived, known_before=True)
                life.cached_tokens = request.cached_tokens
                self._add(life)
        for replica in state.replicas:
            for plan in replica.plans:
                self._ordered.setdefault((replica.index, plan.seq), (plan.begun, ()))

    def step(self, call: Call, effects: list[Effect]) -> None:
        """A call was applied."""
        if call.event is not None:
            self._event(call.event, call.now)
        for effect in effects:
            self._effect(effect, call.now)
        self._count(call.now)

    def close(self, now: float) -> None:
        """The recording has ended: phases that last are cut there."""
        state = self._state
        for request in state.requests if state is not None else ():
            if not request.ended and (life := self._open.get(request.rid)) is not None:
                life.phases.append(PhaseSpan(request.phase, request.since, now))

    def _event(self, event: Event, now: float) -> None:
        match event:
            case Submit(rid=rid) if rid not in self._open:  # else it has left a phase at once
                self._add(RequestLife(event, now))
            case Abort(rid=rid, finish=False) if rid in self._open:
                self._open[rid].cancelled = now
            case PlanDone():
                self._done(event, now)
            case _:
                pass

    def _add(self, life: RequestLife) -> RequestLife:
        self.lives.append(life)
        self._open[life.rid] = life
        return life

    def _effect(self, effect: Effect, now: float) -> None:
        match effect:
            case ReplicaOrder(replica=replica, order=order):
                self._order(order, replica, now)
            case Forward() | CancelForward():
                self._order(effect, 0, now)
            case Tokens(rid=rid, tokens=tokens) if (life := self._open.get(rid)) is not None:
                life.tokens += len(tokens)
                if life.first_token is None:
                    life.first_token = now
            case Held(rid=rid, usage=usage) if (life := self._open.get(rid)) is not None:
                life.cached_tokens = usage.cached_tokens
            case RequestFinished(rid=rid) if (life := self._open.pop(rid, None)) is not None:
                life.ended, life.outcome = now, effect.reason
                life.cached_tokens = effect.usage.cached_tokens
            case RequestFailed(error=error) if error.code == "rid_in_use":
                pass  # of another request with the id of one that is open
            case RequestFailed(rid=rid, error=error) if (life := self._open.pop(rid, None)) is not None:
                life.ended, life.outcome, life.failed = now, error.code, True
                if error.code == CANCELLED and life.cancelled is None:  # by its decode server
                    life.cancelled = now
            case _:
                pass

    def _order(self, order: object, replica: int, now: float) -> None:
        if isinstance(order, Forward):
            self._ordered[replica, order.seq] = now, order.rows
        elif isinstance(order, CancelForward):
            self._cancelled.add((replica, order.forward))

    def _done(self, event: PlanDone, now: float) -> None:
        """A rank has computed a pass. One that was cancelled says nothing of what passes take."""
        assert self._state is not None, "a call was applied"
        replica = self._state.with_rank(event.stage)
        found = self._ordered.get((replica.index, event.seq))
        if found is not None:
            ordered, rows = found
            kept = () if (replica.index, event.seq) in self._cancelled else rows
            start = max(now - event.duration_s, self._ends.get(event.stage, now - event.duration_s))
            self._ends[event.stage] = now
            self.passes.append(RankPass(event.stage, event.seq, start, now, event.duration_s, ordered, kept))
            if event.stage == replica.sampler:
                del self._ordered[replica.index, event.seq]

    def _left(self, request: Request, phase: Phase, since: float, now: float) -> None:
        life = self._open.get(request.rid) or self._add(RequestLife(request.submit, request.arrived))
        life.phases.append(PhaseSpan(phase, since, now))

    def _count(self, now: float) -> None:
        state = self._state
        assert state is not None, "a Scheduler was restored"
        phases = state.phases
        waiting = phases[Phase.BOOTSTRAP] + phases[Phase.WAITING]
        counts = (
            waiting,
            sum(phases.values()) - waiting,
            state.unplanned,
            sum(replica.cache.leased for replica in state.replicas),
            sum(replica.cache.leased + replica.cache.cached for replica in state.replicas),
            state.plans_in_flight,
        )
        if not self.loads or self.loads[-1][1:] != counts:
            self.loads.append(LoadPoint(now, *counts))


def gather(recording: Recording, progress: Progress = nobody) -> tuple[RecordedTimeline, Playback]:
    """Play a recording to its end."""
    gathering = _Gathering()
    playback = Playback(recording, progress, gathering.adopt)
    for step in playback:
        gathering.step(step.call, step.effects)
    gathering.close(playback.now)
    state = playback.scheduler.state
    ranks = sorted({one.rank for one in gathering.passes})
    timeline = RecordedTimeline(
        playback.began,
        playback.now,
        gathering.lives,
        gathering.passes,
        gathering.loads,
        {rank: state.config.layout.name(rank) for rank in ranks},
        state.config.credits,
        sum(replica.cache.total for replica in state.replicas),
    )
    return timeline, playback
