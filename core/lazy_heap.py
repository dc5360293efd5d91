"""A priority queue whose entries are moved and removed in O(log n): old entries stay until they come up."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Id = TypeVar("Id", bound=Hashable)
Item = TypeVar("Item")
Key = tuple[Any, ...]  # keys of one heap compare with each other

SPARE = 64  # old entries that are always let be


class LazyHeap(Generic[Id, Item]):
    """Items by key, smallest first. An item is in it once, under its id. Equal keys: put first, out first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Id, Item]] = []
        self._current: dict[Id, int] = {}  # id -> number of its entry
        self._entries = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, name: Id) -> bool:
        return name in self._current

    def put(self, name: Id, key: Key, item: Item) -> None:
        """Add an item, or move it."""
        self._entries += 1
        self._current[name] = self._entries
        heapq.heappush(self._heap, (key, self._entries, name, item))
        if len(self._heap) > 2 * len(self._current) + SPARE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def remove(self, name: Id) -> None:
        """Take an item out. Raises KeyError when it is not there."""
        del self._current[name]

    def first(self) -> tuple[Key, Item] | None:
        """The smallest key and its item; None when it is empty."""
        while self._heap:
            entry = self._heap[0]
            if self._is_current(entry):
                return entry[0], entry[3]
            heapq.heappop(self._heap)
        return None

    def items(self) -> Iterator[Item]:
        """The items, in no order, O(n)."""
        return (entry[3] for entry in self._heap if self._is_current(entry))

    def ordered(self) -> Iterator[tuple[Key, Item]]:
        """Keys and items, smallest first, O(log n) each; they stay in the heap.

        Items may be moved and removed meanwhile: one that was moved comes up (again) at its new place. One iteration
        at a time.
        """
        taken: list[tuple[Key, int, Id, Item]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._is_current(entry):
                    taken.append(entry)
                    yield entry[0], entry[3]
        finally:
            for entry in taken:
                if self._is_current(entry):
                    heapq.heappush(self._heap, entry)

    def _is_current(self, entry: tuple[Key, int, Id, Item]) -> bool:
        return self._current.get(entry[2]) == entry[1]
