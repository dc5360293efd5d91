"""When forward passes are ordered: shortly before the first stage needs them, so that late arrivals are in them."""

import pytest

from headrace.core.types.requests.request import Discard
from headrace.scheduler.batching.planner import LEAD_S, MARGIN
from headrace.scheduler.costs.chunking import Cost
from tests.scheduler.bench import Bench

COST = (0.0, 1e-2, 2e-2)  # 180 ms for a full plan of 16 tokens
FULL_S = 0.18
HELD_S = FULL_S * (1 - MARGIN) - LEAD_S


def measured(stages: int = 1, cost: Cost = COST, **settings: object) -> Bench:
    """Stages whose costs are known."""
    bench = Bench(up=False, stages=stages, **settings)
    for stage in range(stages):
        bench.do(bench.ready(stage, cost=cost))
    return bench


def test_the_next_pass_is_ordered_shortly_before_the_running_one_ends() -> None:
    bench = measured()
    bench.submit("a", 60, route=Discard())
    assert bench.plan() is not None
    assert bench.plan() is None
    assert bench.scheduler.next_deadline() == pytest.approx(bench.now + HELD_S)
    bench.wait(HELD_S - 0.001)
    assert bench.plan() is None
    bench.wait(0.001)
    assert bench.plan() is not None
    bench.wait(1.0)
    assert bench.plan() is None, "no credit is left"


def test_what_arrives_while_a_pass_is_computed_is_in_the_next_one() -> None:
    bench = measured()
    bench.submit("long", 60, route=Discard())
    bench.plan()
    assert bench.plan() is None
    bench.wait(FULL_S / 2)
    bench.submit("short", 4, route=Discard(), cache_salt="other")
    bench.wait(HELD_S - FULL_S / 2)
    forward = bench.plan()
    assert forward is not None
    assert [row.start for row in forward.rows] == [16, 0]


def test_a_pass_that_ends_sooner_than_predicted_is_followed_at_once() -> None:
    bench = measured()
    bench.submit("a", 60, route=Discard())
    forward = bench.plan()
    assert forward is not None
    assert bench.plan() is None
    bench.wait(FULL_S / 3)
    bench.done(forward, seconds=FULL_S / 3)
    assert bench.plan() is not None


def test_a_pass_after_two_that_the_first_stage_has_is_ordered_when_it_has_nearly_done_both() -> None:
    bench = measured(stages=2, pipeline_depth=2)
    bench.submit("a", 100, route=Discard())
    first = bench.plan()
    assert first is not None
    bench.wait(HELD_S)
    second = bench.plan()
    assert second is not None
    assert bench.plan() is None
    assert bench.scheduler.next_deadline() == pytest.approx(100.0 + 2 * FULL_S * (1 - MARGIN) - LEAD_S)
    bench.wait(FULL_S - HELD_S)
    bench.done(first, stage=0, seconds=FULL_S)
    assert bench.plan() is None, "it computes the second"
    assert bench.scheduler.next_deadline() == pytest.approx(bench.now + HELD_S)
    bench.wait(HELD_S)
    assert bench.plan() is not None, "though the last stage has reported none"


def test_without_measured_costs_and_beside_decode_rows_a_pass_is_ordered_as_soon_as_there_is_a_credit() -> None:
    bench = Bench()
    bench.submit("a", 60, route=Discard())
    assert bench.plan() is not None
    assert bench.plan() is not None

    bench = measured()
    bench.submit("a", 4)
    bench.compute(1)
    bench.submit("b", 60, route=Discard())
    assert bench.plan() is not None, "with a decode row of a"
    assert bench.plan() is not None


def test_nothing_to_compute_sets_no_deadline() -> None:
    bench = measured()
    bench.submit("a", 10, route=Discard())
    forward = bench.plan()
    assert forward is not None
    assert bench.plan() is None
    bench.done(forward, 1)
    assert bench.plan() is None
    assert bench.scheduler.next_deadline() is None


def test_passes_so_long_that_an_order_takes_no_time_beside_them_are_not_ordered_ahead() -> None:
    bench = measured(cost=(0.0, 2e-2, 0.0))
    bench.submit("a", 60, route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.wait(5.0)
    assert bench.plan() is None
    bench.done(forward, seconds=0.32)
    assert bench.plan() is not None
