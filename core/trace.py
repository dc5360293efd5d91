"""What the processes of a server note while GET /debug/trace records: plans and transfers of the stages, the requests'
phases and the plans' count of the scheduler.

Times are seconds of the noting process's monotonic clock. The processes of one machine share that clock; a stage
elsewhere does not, so each stage says how far the time of day is ahead of it.
"""

from typing import Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")
Outcome = Literal["acknowledged", "refused", "open"]


class PlannedTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of a plan: positions [start, start + count) of a request, under the serial that stages know."""

    request: int
    start: int
    count: int


class PlanTrace(msgspec.Struct, frozen=True):
    """A plan on one stage.

    marks: when it came up there (and waited for what other stages send), when its layers began, when sampling or
    passing on began, and when all was done. The later ones are missing where the plan had not come so far.
    """

    seq: int
    marks: tuple[float, ...]
    rows: tuple[PlannedTokens, ...]


class TransferTrace(msgspec.Struct, frozen=True):
    """A chunk on its way from one stage to one stage of a peer. ended: when it was answered, or when recording ended
    before it was ("open")."""

    request: int
    ticket: str
    chunk: int
    peer_stage: int
    bytes: int
    sent: float
    ended: float
    outcome: Outcome


class StageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage noted. dropped_*: how many did not fit in. wall_offset_s: see
    headrace.core.runtime.clock.wall_offset()."""

    plans: tuple[PlanTrace, ...]
    transfers: tuple[TransferTrace, ...]
    dropped_plans: int
    dropped_transfers: int
    ended: float
    wall_offset_s: float


class PhaseTrace(msgspec.Struct, frozen=True):
    """A phase that a request was in. request: its number in order of arrival. then: the phase that followed, "" where
    recording ended before it did."""

    request: int
    phase: str
    start: float
    end: float
    then: str


class RequestName(msgspec.Struct, frozen=True):
    """Who a request is. serial: what stages call it; one that was preempted has had several. request: its number in
    order of arrival. peer: where its KV goes or comes from, "" for nowhere."""

    serial: int
    request: int
    rid: str
    ticket: str
    peer: str


class LoadSample(msgspec.Struct, frozen=True):
    """The scheduler's counts from a moment on. in_flight, issued: plans, the latter since recording began. queues:
    requests by phase, as SchedulerTrace.phases names them. unplanned: prompt tokens."""

    at: float
    in_flight: int
    issued: int
    queues: tuple[int, ...]
    unplanned: int


class SchedulerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler noted between started and ended. stages: how many of them report, each on its own."""

    started: float
    ended: float
    stages: int
    names: tuple[RequestName, ...]
    spans: tuple[PhaseTrace, ...]
    phases: tuple[str, ...]
    loads: tuple[LoadSample, ...]
    dropped: int


class Buffer(Generic[T]):
    """Keeps what it is given while it is on, until limit is reached; of the rest it keeps the number. Owned by one
    thread."""

    def __init__(self, limit: int) -> None:
        self.on = False
        self._limit = limit
        self._room = limit
        self._items: list[T] = []
        self._dropped = 0

    def start(self) -> None:
        """Begin anew, with nothing in it."""
        self.on = True
        self._room, self._items, self._dropped = self._limit, [], 0

    def add(self, item: T, size: int = 1) -> None:
        """Keep an item that takes size of the limit. Once one was dropped all later ones are, so that what is kept is
        complete up to a moment."""
        if not self.on:
            return
        if self._dropped or size > self._room:
            self._dropped += 1
            return
        self._room -= size
        self._items.append(item)

    def stop(self) -> tuple[tuple[T, ...], int]:
        """Switch it off; return what it kept, in order, and how much it dropped."""
        items, self._items, self.on = tuple(self._items), [], False
        return items, self._dropped
