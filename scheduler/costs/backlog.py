"""Work by rank: what is queued, and what share of the time arriving work takes, in the order of the policy.

A rank is a level (priority; whether it goes behind those with an objective) and a bucket, log2 of the size that the
policy orders by within a level, in eighths:

    fcfs   one rank for all           srpt   size = seconds of work left
    slo    with an objective: size = its seconds; the others behind them: size = seconds of work left
"""

from collections import Counter
from collections.abc import Callable
from math import exp
from typing import NamedTuple, TypeVar

from headrace.core.config.scheduler import Policy
from headrace.scheduler.costs.cost_model import NOTHING, Load

TAU_S = 120.0
"""Time constant of the averages: what arrived that long ago counts 1/e."""

STEPS_LOG2 = 3  # buckets of an octave: 2 ** 3
MOST_LEVELS = 32
"""Priorities further from 0 than this are taken together, so that their number is bounded."""

Level = tuple[int, int]
K = TypeVar("K", int, Level)


class Rank(NamedTuple):
    """A place in the order of the policy. Equal ranks: first come, first served, as far as is known."""

    level: Level
    bucket: int = 0


UNRANKED = Rank((0, 0))
"""Of a request of which nothing is counted yet."""

RankOf = Callable[[int, float | None, float], Rank]
"""Rank by priority, seconds of the objective (None: none) and seconds of work left."""


def rank_of(policy: Policy) -> RankOf:
    """How requests are ranked under a policy."""
    return {"fcfs": _rank_fcfs, "srpt": _rank_srpt, "slo": _rank_slo}[policy]


def bucket_of(seconds: float) -> int:
    """The bucket of a size: log2 of its microseconds in eighths, 0 for less than 8 µs."""
    micros = round(seconds * 1e6)
    octave = micros.bit_length() - 1 - STEPS_LOG2
    return 0 if octave < 0 else (octave << STEPS_LOG2) + (micros >> octave)


def lower_edge(bucket: int) -> float:
    """The least size in a bucket, seconds."""
    steps = 1 << STEPS_LOG2
    if bucket < steps:
        return 0.0
    octave = (bucket - steps) // steps
    return float((bucket - octave * steps) << octave) / 1e6


class Backlog:
    """The load that is queued, by rank. Exact, whatever the order in which it comes and goes."""

    def __init__(self) -> None:
        self._buckets: dict[Level, dict[int, Load]] = {}
        self._levels: dict[Level, Load] = {}
        self._requests: Counter[Rank] = Counter()

    def move(self, old: Rank, taken: Load, new: Rank, added: Load) -> None:
        """A request that counted with some load under one rank counts under another."""
        self._add(old, NOTHING.minus(taken))
        self._add(new, added)
        self._requests[old] -= taken != NOTHING
        self._requests[new] += added != NOTHING
        for rank in (old, new):
            if not self._requests[rank]:
                del self._requests[rank]

    def ahead(self, rank: Rank) -> Load:
        """What goes before a request that arrives with this rank: all that is not behind it."""
        found = NOTHING
        for level, load in self._levels.items():
            if level < rank.level:
                found = found.plus(load)
        for bucket, load in self._buckets.get(rank.level, {}).items():
            if bucket <= rank.bucket:
                found = found.plus(load)
        return found

    def behind(self, rank: Rank) -> int:
        """Requests that a request which arrives with this rank goes before."""
        return sum(requests for each, requests in self._requests.items() if each > rank)

    def total(self) -> Load:
        """All of it."""
        found = NOTHING
        for load in self._levels.values():
            found = found.plus(load)
        return found

    def _add(self, rank: Rank, load: Load) -> None:
        if load == NOTHING:
            return
        buckets = self._buckets.setdefault(rank.level, {})
        _put(buckets, rank.bucket, buckets.get(rank.bucket, NOTHING).plus(load))
        _put(self._levels, rank.level, self._levels.get(rank.level, NOTHING).plus(load))
        if not buckets:
            del self._buckets[rank.level]


class ArrivingWork:
    """What arrives, by rank: seconds of work per second, a share of the time, or requests. Averages over TAU_S."""

    def __init__(self) -> None:
        self._buckets: dict[Level, dict[int, _Average]] = {}
        self._levels: dict[Level, _Average] = {}

    def add(self, rank: Rank, seconds: float, now: float) -> None:
        """A request with so much work has arrived."""
        buckets = self._buckets.setdefault(rank.level, {})
        buckets.setdefault(rank.bucket, _Average()).add(seconds, now)
        self._levels.setdefault(rank.level, _Average()).add(seconds, now)

    def share(self, rank: Rank, now: float, *, equal: bool = False) -> float:
        """Share of the time that arrivals take which go before a queued request of this rank. equal: those of the same
        rank, too. May be above 1."""
        own = self.own_level(rank, now, equal=equal)
        return self.before_level(rank.level, now) + sum(share for _, share in own)

    def from_rank_on(self, rank: Rank, now: float) -> float:
        """What arrives with this rank or one that goes behind it."""
        later = sum((average.at(now) for level, average in self._levels.items() if level > rank.level), 0.0)
        own = self._buckets.get(rank.level, {}).items()
        return later + sum(average.at(now) for bucket, average in own if bucket >= rank.bucket)

    def total(self, now: float) -> float:
        """What arrives, whatever its rank."""
        return sum((average.at(now) for average in self._levels.values()), 0.0)

    def before_level(self, level: Level, now: float) -> float:
        """Share of the time that arrivals of the levels before this one take."""
        return sum((average.at(now) for each, average in self._levels.items() if each < level), 0.0)

    def own_level(self, rank: Rank, now: float, *, equal: bool = False) -> list[tuple[int, float]]:
        """Buckets of the level below the rank's own, and their shares, in ascending order."""
        end = rank.bucket + equal
        return [
            (bucket, average.at(now))
            for bucket, average in sorted(self._buckets.get(rank.level, {}).items())
            if bucket < end
        ]


class _Average:
    """An exponential average of seconds of work per second."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._share = self.at(now) + seconds / TAU_S
        self._at = now

    def at(self, now: float) -> float:
        return self._share * exp(min(0.0, self._at - now) / TAU_S) if self._share else 0.0


def _put(loads: dict[K, Load], key: K, load: Load) -> None:
    if load == NOTHING:
        loads.pop(key, None)
    else:
        loads[key] = load


def _rank_fcfs(_priority: int, _objective_s: float | None, _work_s: float) -> Rank:
    return Rank((0, 0))


def _rank_srpt(priority: int, _objective_s: float | None, work_s: float) -> Rank:
    return Rank((_level(priority), 0), bucket_of(work_s))


def _rank_slo(priority: int, objective_s: float | None, work_s: float) -> Rank:
    if objective_s is None:
        return Rank((_level(priority), 1), bucket_of(work_s))
    return Rank((_level(priority), 0), bucket_of(objective_s))


def _level(priority: int) -> int:
    return min(max(priority, -MOST_LEVELS), MOST_LEVELS)
