"""Deadlines by timer: moved and cleared in O(1), the earliest found in O(log n)."""

import heapq
import math
from collections.abc import Iterator

import msgspec

SPARE = 64  # entries without a deadline that are always let be


class _OfRequest(msgspec.Struct, frozen=True):
    arrival: int
    """The request's number in order of arrival."""


class _OfReplica(msgspec.Struct, frozen=True):
    replica: int
    """Its index."""


class BootstrapTimer(_OfRequest, frozen=True):
    """A request whose ticket no peer has reserved."""


class TransferTimer(_OfRequest, frozen=True):
    """Bytes without an acknowledgement."""


class RequestTimer(_OfRequest, frozen=True):
    """The time that the client is willing to wait."""


class AnswerTimer(_OfRequest, frozen=True):
    """PrepareReceive, CancelSend or CancelReceive without an answer from every stage."""


class LeaseTimer(_OfRequest, frozen=True):
    """A held ticket that no peer reserves or renews."""


class LeftoverTimer(_OfRequest, frozen=True):
    """Pages of a failed fetch that no other attempt has gone on from."""


class ReservationTimer(msgspec.Struct, frozen=True):
    """A reservation whose prompt has not come."""

    ticket: str


class PlanTimer(_OfReplica, frozen=True):
    """Plans in flight without any of them done."""


class CopyTimer(_OfReplica, frozen=True):
    """Copies of pages under way without any of them done."""


class OrderTimer(_OfReplica, frozen=True):
    """The next forward pass is ordered; replica 0 stands for all in lockstep."""


class DrainTimer(msgspec.Struct, frozen=True):
    """First tokens that peers may still ask for."""


AnyRequestTimer = BootstrapTimer | TransferTimer | RequestTimer | AnswerTimer | LeaseTimer | LeftoverTimer
Timer = AnyRequestTimer | ReservationTimer | PlanTimer | CopyTimer | OrderTimer | DrainTimer
"""What a deadline watches, and whose it is. Timers of different kinds are never equal."""

_Place = tuple[float, int]  # of a deadline in the order: its time, and the number of its set()
_LAST = (math.inf, 0)


class Deadlines:
    """Each timer has at most one deadline, and one entry in the heap that is not later than the deadline.

    Moving a deadline back, or clearing it, leaves the entry where it is; it is corrected when it comes up, or dropped
    when most of the heap is such: clients may set deadlines that are years away. Equal deadlines come up in the order
    in which they were set, whenever next() was called.
    """

    def __init__(self) -> None:
        self._at: dict[Timer, _Place] = {}
        self._entry: dict[Timer, _Place] = {}
        self._heap: list[tuple[_Place, Timer]] = []
        self._count = 0

    def set(self, timer: Timer, at: float) -> None:
        """Set or move a deadline."""
        self._count += 1
        self._at[timer] = place = (at, self._count)
        if place < self._entry.get(timer, _LAST):
            self._push(timer, place)

    def clear(self, timer: Timer) -> None:
        """Remove a deadline, if there is one."""
        self._at.pop(timer, None)

    def active(self, timer: Timer) -> bool:
        """A deadline is set and has not come up."""
        return timer in self._at

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            entry, timer = self._heap[0]
            place = self._at.get(timer)
            if place == entry:
                return entry[0]
            heapq.heappop(self._heap)
            if self._entry.get(timer) != entry:
                continue  # an earlier entry of the same timer took its place
            del self._entry[timer]
            if place is not None:
                self._push(timer, place)
        return None

    def due(self, now: float) -> Iterator[Timer]:
        """Remove and yield what has passed, earliest first, including deadlines that are set in the past meanwhile."""
        while (at := self.next()) is not None and at <= now:
            _, timer = heapq.heappop(self._heap)
            self._at.pop(timer, None)
            self._entry.pop(timer, None)
            yield timer

    def _push(self, timer: Timer, place: _Place) -> None:
        self._entry[timer] = place
        heapq.heappush(self._heap, (place, timer))
        if len(self._heap) > 2 * len(self._at) + SPARE:
            self._entry = {each: self._entry[each] for each in self._at}
            self._heap = [entry for entry in self._heap if self._entry.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)
