"""Eviction: which cached page, or copy in a tier, leaves first.

lru     least recently used
turns   by the turn of the conversation that used the page last, aged: the chance that a conversation goes on grows with
        every turn it had. rank = L + 1 + ALPHA * min(turn, MAX_TURN), L = the highest rank evicted so far (GreedyDual);
        equal ranks by last use. A first prompt of few tokens hardly ever goes on, and ranks lower than all others.

Ranks are integers, in units of 1 / UNIT, so that they do not depend on the platform.
"""

from typing import Protocol

from headrace.core.config.scheduler import Eviction

UNIT = 10
ALPHA = 2  # measured by benchmarks.eviction: 1 is a little better for large pools, 2 for small ones
MAX_TURN = 8
SHORT_TOKENS = 1024  # a first prompt of at most so many tokens is short
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
