"""Eviction: which cached page, or copy in a tier, leaves first.

lru     least recently used
turns   by the turn of the conversation that used the page last, aged: the chance that a conversation goes on grows with
        every turn it had. rank = L + 1 + ALPHA * min(turn, MAX_TURN), L = the highest rank evicted so far (GreedyDual);
        equal ranks by last use. A first prompt of few tokens hardly ever goes on, and ranks lower than all others.

Ranks are integers, in units of 1 / UNIT, so that they do not depend on the platform.
"""

import heapq
from collections.abc import Callable
from typing import Protocol

from headrace.core.config.scheduler import Eviction
from headrace.scheduler.kv.node import Node

UNIT = 10
ALPHA = 2  # measured by benchmarks.eviction: 1 is a little better for large pools, 2 for small ones
MAX_TURN = 8
SHORT_TOKENS = 1024  # a first prompt of at most so many tokens is short
SPARE = 64  # entries in a queue of nodes that hold nothing any more which are always let be
SHARED_BY = 4  # a page that so many different ones follow is a common prefix, and not of one conversation


class Ranking(Protocol):
    """Ranks pages for eviction, lowest first; equal ranks by last use."""

    def rank(self, turn: int, short: bool) -> int:
        """Rank of a page that is used now, by the request's turn of its conversation (0: the first) and whether the
        request is a short first prompt."""
        ...

    def evicted(self, rank: int) -> None:
        """A page of this rank was evicted."""
        ...


class LeastRecentlyUsed:
    """All ranks are equal, so that the last use decides."""

    def rank(self, turn: int, short: bool) -> int:
        """Always 0."""
        return 0

    def evicted(self, rank: int) -> None:
        """Changes nothing."""


class AgedTurns:
    """Aged turn count; see the module."""

    def __init__(self) -> None:
        self._age = 0

    def rank(self, turn: int, short: bool) -> int:
        """Rank of a page that is used now."""
        return self._age + (1 if short else UNIT * (1 + ALPHA * min(turn, MAX_TURN)))

    def evicted(self, rank: int) -> None:
        """Pages used from now on rank above this one."""
        self._age = max(self._age, rank)


def make_ranking(eviction: Eviction) -> Ranking:
    """The ranking of an eviction order."""
    return LeastRecentlyUsed() if eviction == "lru" else AgedTurns()


class EvictionQueue:
    """Candidates for eviction, lowest (rank, last use) first, O(log n) each.

    A node has at most one entry, with the rank and last use that it had when it was offered; the entry is checked, and
    put back or dropped, when it comes up.
    """

    def __init__(self, evictable: Callable[[Node], bool], holds: Callable[[Node], bool]) -> None:
        """evictable: a node may be evicted now. holds: it has what can be evicted, if not now."""
        self._evictable = evictable
        self._holds = holds
        self._heap: list[tuple[int, int, int, Node]] = []
        self._queued: set[int] = set()  # numbers of nodes

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node, holders: int) -> None:
        """Make the node a candidate, if it may be evicted. holders: nodes that hold something, which bound the size."""
        if node.number in self._queued or not self._evictable(node):
            return
        self._push(node)
        if len(self._heap) > 2 * holders + SPARE:  # most nodes have left otherwise than by eviction
            self._heap = [entry for entry in self._heap if self._holds(entry[3])]
            self._queued = {entry[2] for entry in self._heap}
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Take out the candidate that is evicted next; None when there is none."""
        while self._heap:
            _, used, number, node = heapq.heappop(self._heap)
            self._queued.discard(number)
            if self._evictable(node):
                if node.used == used:
                    return node
                self._push(node)
        return None

    def first(self) -> Node | None:
        """The candidate that is evicted next, which stays; None when there is none."""
        node = self.pop()
        if node is not None:
            self._push(node)
        return node

    def _push(self, node: Node) -> None:
        self._queued.add(node.number)
        heapq.heappush(self._heap, (node.rank, node.used, node.number, node))
