"""The queue of what may be evicted: nodes of the prefix cache, by their places in the eviction order."""

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

SPARE = 64  # entries of nodes that hold nothing any more which are always let be


class Evictable(Protocol):
    """What an EvictionQueue takes."""

    number: int
    """No other candidate has it."""

    @property
    def place(self) -> tuple[int, int]:
        """Rank and last use."""
        ...


Item = TypeVar("Item", bound=Evictable)


class EvictionQueue(Generic[Item]):
    """Candidates for eviction, lowest (rank, last use) first, O(log n) each.

    A node has at most one entry that counts, with the place that it had when it was offered; the entry is checked, and
    put back or dropped, when it comes up.
    """

    def __init__(self, evictable: Callable[[Item], bool], holds: Callable[[Item], bool]) -> None:
        """evictable: a node may be evicted now. holds: it has what can be evicted, if not now."""
        self._evictable = evictable
        self._holds = holds
        self._heap: list[tuple[int, int, int, Item]] = []
        self._queued: dict[int, int] = {}  # numbers of nodes -> last use in their entries

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: Item) -> bool:
        return node.number in self._queued

    def offer(self, node: Item, holders: int) -> None:
        """Make the node a candidate, if it may be evicted. holders: nodes that hold something, which bound the size."""
        if node.number not in self._queued:
            self.put(node, holders)

    def put(self, node: Item, holders: int) -> None:
        """Make the node a candidate at its present place, which may be before that of the entry that it has."""
        if not self._evictable(node):
            return
        self._push(node)
        if len(self._heap) > 2 * holders + SPARE:  # most nodes have left otherwise than by eviction
            self._heap = [entry for entry in self._heap if self._counts(entry) and self._holds(entry[3])]
            self._queued = {entry[2]: entry[1] for entry in self._heap}
            heapq.heapify(self._heap)

    def pop(self) -> Item | None:
        """Take out the candidate that is evicted next; None when there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._counts(entry):
                continue
            _, used, number, node = entry
            del self._queued[number]
            if self._evictable(node):
                if node.place[1] == used:
                    return node
                self._push(node)
        return None

    def first(self) -> Item | None:
        """The candidate that is evicted next, which stays; None when there is none."""
        node = self.pop()
        if node is not None:
            self._push(node)
        return node

    def _push(self, node: Item) -> None:
        rank, used = node.place
        self._queued[node.number] = used
        heapq.heappush(self._heap, (rank, used, node.number, node))

    def _counts(self, entry: tuple[int, int, int, Item]) -> bool:
        return self._queued.get(entry[2]) == entry[1]
