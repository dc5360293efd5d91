"""Work by rank: sums equal those over all requests, averages follow what arrives and fade."""

import random
from itertools import pairwise
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config.scheduler import Policy
from headrace.scheduler.costs.backlog import (
    MOST_LEVELS,
    TAU_S,
    UNRANKED,
    ArrivingWork,
    Backlog,
    Rank,
    bucket_of,
    lower_edge,
    rank_of,
)
from headrace.scheduler.costs.cost_model import NOTHING, Load

RANKS = st.builds(Rank, st.tuples(st.integers(-2, 2), st.integers(0, 1)), st.integers(0, 6))
LOADS = st.integers(0, 50).map(lambda end: Load.between(0, end))


@given(st.lists(st.tuples(st.integers(0, 5), RANKS, LOADS), max_size=60), RANKS)
def test_sums_equal_those_over_all_requests(moves: list[tuple[int, Rank, Load]], asked: Rank) -> None:
    backlog, known = Backlog(), dict.fromkeys(range(6), (UNRANKED, NOTHING))
    for number, rank, load in moves:
        old, counted = known[number]
        backlog.move(old, counted, rank, load)
        known[number] = rank, load
    ahead = total = NOTHING
    for rank, load in known.values():
        total = total.plus(load)
        if rank.level < asked.level or (rank.level == asked.level and rank.bucket <= asked.bucket):
            ahead = ahead.plus(load)
    assert (backlog.ahead(asked), backlog.total()) == (ahead, total)
    assert backlog.behind(asked) == sum(rank > asked for rank, load in known.values() if load != NOTHING)
    for old, counted in known.values():
        backlog.move(old, counted, UNRANKED, NOTHING)
    assert backlog.total() == NOTHING


@given(st.floats(0, 1e6))
def test_a_bucket_holds_sizes_that_differ_by_an_eighth(seconds: float) -> None:
    bucket = bucket_of(seconds)
    low, high = lower_edge(bucket), lower_edge(max(8, bucket + 1))
    assert low <= round(seconds, 6) < high
    assert high - low <= max(low / 8, 8e-6) * (1 + 1e-9)


def test_buckets_ascend_and_are_few() -> None:
    edges = [lower_edge(bucket) for bucket in range(bucket_of(1e6) + 2)]
    assert len(edges) < 320, "up to eleven days of work"
    assert [edges[0], edges[8]] == [0.0, 8e-6]
    assert all(low < high for low, high in pairwise(edges[8:]))


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [{(0, None, 1.0), (5, None, 9.0), (-5, 2.0, 0.1)}]),
        ("srpt", [{(-1, None, 9.0)}, {(0, None, 1.0), (0, 2.0, 1.0)}, {(0, None, 3.0)}, {(1, 0.1, 0.1)}]),
        ("slo", [{(-1, None, 9.0)}, {(0, 1.0, 9.0)}, {(0, 2.0, 0.1)}, {(0, None, 0.1)}, {(0, None, 1.0)}]),
    ],
)
def test_ranks_follow_the_policy(policy: Policy, order: list[set[tuple[int, float | None, float]]]) -> None:
    ranks = [{rank_of(policy)(*request) for request in group} for group in order]
    assert all(len(group) == 1 for group in ranks)
    flat = [rank for group in ranks for rank in group]
    assert flat == sorted(set(flat))


def test_far_priorities_are_taken_together() -> None:
    srpt = rank_of("srpt")
    assert srpt(-(10**9), None, 1.0) == srpt(-MOST_LEVELS, None, 1.0) < srpt(-MOST_LEVELS + 1, None, 1.0)


def test_shares_are_those_of_what_arrives() -> None:
    """0.3 of the time by small work, 0.5 by large; and 0.1 of a later priority."""
    rng, work = random.Random(1), ArrivingWork()
    small, large, later = Rank((0, 0), bucket_of(0.1)), Rank((0, 0), bucket_of(2.0)), Rank((1, 0), bucket_of(0.01))
    arrivals = []
    for rank, seconds, share in ((small, 0.1, 0.3), (large, 2.0, 0.5), (later, 0.01, 0.1)):
        now = 0.0
        while (now := now + rng.expovariate(share / seconds)) < 3000:
            arrivals.append((now, rank, seconds))
    for now, rank, seconds in sorted(arrivals):
        work.add(rank, seconds, now)
    exact = {
        rank: sum(seconds * exp((at - 3000) / TAU_S) / TAU_S for at, each, seconds in arrivals if each == rank)
        for rank in (small, large, later)
    }
    assert exact[small] == pytest.approx(0.3, rel=0.2)
    assert work.share(small, 3000) == 0.0
    assert work.share(small, 3000, equal=True) == pytest.approx(exact[small])
    assert work.share(large, 3000) == pytest.approx(exact[small])
    assert work.share(large, 3000, equal=True) == pytest.approx(exact[small] + exact[large])
    assert work.share(later, 3000) == pytest.approx(exact[small] + exact[large])
    assert work.from_rank_on(later, 3000) == pytest.approx(exact[later])
    assert work.from_rank_on(large, 3000) == pytest.approx(exact[large] + exact[later])
    assert work.from_rank_on(small, 3000) == pytest.approx(sum(exact.values()))
    assert work.total(3000) == pytest.approx(sum(exact.values()))
    assert work.share(large, 3000 + TAU_S) == pytest.approx(exact[small] / exp(1))
