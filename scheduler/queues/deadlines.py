"""Deadlines by timer and key: moved and cleared in O(1), the earliest found in O(log n)."""

import heapq
import math
from collections.abc import Iterator
from enum import IntEnum

Key = int | str

SPARE = 64  # entries without a deadline that are always let be


class Timer(IntEnum):
    """What a deadline watches. The key beside it is an arrival number, a ticket for RESERVATION, or the index of a
    replica for PLAN, COPY and ORDER; DRAIN has only one."""

    BOOTSTRAP = 0  # a request whose ticket no peer has reserved
    RESERVATION = 1  # a reservation whose prompt has not come
    TRANSFER = 2  # bytes without an acknowledgement
    REQUEST = 3  # the time that the client is willing to wait
    ANSWER = 4  # PrepareReceive, CancelSend or CancelReceive without an answer from every stage
    PLAN = 5  # plans in flight without any of them done
    LEASE = 6  # a held ticket that no peer reserves or renews
    COPY = 7  # copies of pages under way without any of them done
    ORDER = 8  # the next forward pass is ordered
    DRAIN = 9  # first tokens that peers may still ask for


class Deadlines:
    """Each (timer, key) has at most one deadline, and one entry in the heap that is not later than the deadline.

    Moving a deadline back, or clearing it, leaves the entry where it is; it is corrected when it comes up, or dropped
    when most of the heap is such: clients may set deadlines that are years away.
    """

    def __init__(self) -> None:
        self._at: dict[tuple[Timer, Key], float] = {}
        self._entry: dict[tuple[Timer, Key], float] = {}
        self._heap: list[tuple[float, int, tuple[Timer, Key]]] = []
        self._count = 0

    def set(self, timer: Timer, key: Key, at: float) -> None:
        """Set or move a deadline."""
        name = (timer, key)
        self._at[name] = at
        if at < self._entry.get(name, math.inf):
            self._push(name, at)

    def clear(self, timer: Timer, key: Key) -> None:
        """Remove a deadline, if there is one."""
        self._at.pop((timer, key), None)

    def active(self, timer: Timer, key: Key) -> bool:
        """A deadline is set and has not come up."""
        return (timer, key) in self._at

    def reset(self) -> None:
        """Clear all of them."""
        self._at.clear()
        self._entry.clear()
        self._heap.clear()

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            entry, _, name = self._heap[0]
            at = self._at.get(name)
            if at == entry:
                return entry
            heapq.heappop(self._heap)
            if self._entry.get(name) != entry:
                continue  # an earlier entry of the same name took its place
            del self._entry[name]
            if at is not None:
                self._push(name, at)
        return None

    def due(self, now: float) -> Iterator[tuple[Timer, Key]]:
        """Remove and yield what has passed, earliest first, including deadlines that are set in the past meanwhile."""
        while (at := self.next()) is not None and at <= now:
            _, _, name = heapq.heappop(self._heap)
            self._at.pop(name, None)
            self._entry.pop(name, None)
            yield name

    def _push(self, name: tuple[Timer, Key], at: float) -> None:
        self._count += 1
        self._entry[name] = at
        heapq.heappush(self._heap, (at, self._count, name))
        if len(self._heap) > 2 * len(self._at) + SPARE:
            self._entry = {each: self._entry[each] for each in self._at}
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
