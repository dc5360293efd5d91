"""Traces recorded for GET /debug/trace: plans and transfers of stages, phases of requests, load of the scheduler; and
the spans of requests that are part of a distributed trace.

Times are seconds of the recording process's monotonic clock. Processes of one machine share that clock; a stage on
another machine does not, so each stage reports the offset of its clock from the time of day.
"""

from typing import Generic, Literal, TypeVar

import msgspec

from headrace.core.types.ranks.layout import Layout

T = TypeVar("T")
Outcome = Literal["acknowledged", "refused", "open"]


class PlannedTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of a plan: positions [start, start + count) of a request."""

    request: int
    """Serial of the request, as in orders."""
    start: int
    count: int


class PlanTrace(msgspec.Struct, frozen=True):
    """A plan on one stage."""

    seq: int
    """Number of its order."""
    marks: tuple[float, ...]
    """Times at which it was taken up (and waited for hidden states), its layers began, sampling or sending began, and
    it was done. The later ones are missing if the plan had not come so far."""
    rows: tuple[PlannedTokens, ...]


class TransferTrace(msgspec.Struct, frozen=True):
    """A chunk sent from one stage to one stage of a peer."""

    request: int
    """Serial of the request, as in orders."""
    ticket: str
    chunk: int
    """Number of the chunk within the request."""
    peer_stage: int
    bytes: int
    """Bytes of the payload."""
    sent: float
    ended: float
    """When it was acknowledged or refused; for "open" ones, when recording ended."""
    outcome: Outcome


class StageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of one stage."""

    plans: tuple[PlanTrace, ...]
    transfers: tuple[TransferTrace, ...]
    dropped_plans: int
    """Plans beyond the buffer's limit."""
    dropped_transfers: int
    """Transfers beyond the buffer's limit."""
    ended: float
    """When recording ended."""
    wall_offset_s: float
    """Offset of the clock of the stage's machine: see wall_offset() in core/runtime/clock.py."""


class PhaseTrace(msgspec.Struct, frozen=True):
    """A phase of a request."""

    request: int
    """Number of the request in order of arrival."""
    phase: str
    start: float
    end: float
    then: str
    """The following phase; empty if recording ended before it."""


class RequestName(msgspec.Struct, frozen=True):
    """The names of a request."""

    serial: int
    """The request's serial, as in orders; a preempted request gets a new one."""
    request: int
    """Number of the request in order of arrival."""
    rid: str
    ticket: str
    peer: str
    """Where its KV goes or comes from; empty for a request without a handoff."""


class LoadSample(msgspec.Struct, frozen=True):
    """The scheduler's load from a point in time on."""

    at: float
    in_flight: int
    """Plans in flight."""
    issued: int
    """Plans issued since recording began."""
    queues: tuple[int, ...]
    """Requests in each phase of SchedulerTrace.phases."""
    unplanned: int
    """Prompt tokens that no plan has yet."""


class SchedulerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of the scheduler."""

    started: float
    ended: float
    stages: int
    """Ranks; each sends a StageTrace."""
    names: tuple[RequestName, ...]
    spans: tuple[PhaseTrace, ...]
    phases: tuple[str, ...]
    """Names of the phases that LoadSample.queues counts."""
    loads: tuple[LoadSample, ...]
    dropped: int
    """Entries beyond the buffer's limit."""
    layout: Layout = Layout()
    """Layout of the ranks, for their names."""


class RequestSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a scheduler did for one request of a distributed trace: a phase, or a chunk of its prefill."""

    phase: str
    """The phase; "" for a chunk."""
    start: float
    end: float
    first: int = 0
    """A chunk computes the positions [first, first + count)."""
    count: int = 0


class Buffer(Generic[T]):
    """Records items up to a limit and counts the rest. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self.on = False
        self._limit = limit
        self._room = limit
        self._items: list[T] = []
        self._dropped = 0

    def start(self) -> None:
        """Begin to record, with an empty buffer."""
        self.on = True
        self._room, self._items, self._dropped = self._limit, [], 0

    def add(self, item: T, size: int = 1) -> None:
        """Record an item that takes size of the limit.

        After the first dropped item all later ones are dropped, so the recording is complete up to a point in time.
        """
        if not self.on:
            return
        if self._dropped or size > self._room:
            self._dropped += 1
            return
        self._room -= size
        self._items.append(item)

    def stop(self) -> tuple[tuple[T, ...], int]:
        """Stop recording. Returns the items, in order, and how many were dropped."""
        items, self._items, self.on = tuple(self._items), [], False
        return items, self._dropped
