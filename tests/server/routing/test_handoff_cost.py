"""What handoffs add: learnt from those that were done, never less than nothing, and forecasts that contain it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.packed import pack
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.server.routing.handoff_cost import FORGET_S, HandoffCost, TransferCosts
from headrace.server.routing.replica_load import REPORT_S, LoadReport
from headrace.server.routing.replica_router import ReplicaRouter

COST = (0.0, 0.001)
PROMPT = pack(range(400))


def test_a_link_and_its_latency_are_told_apart() -> None:
    cost, rng = HandoffCost(), random.Random(1)
    assert cost.seconds(1000) == 0.0
    for _ in range(200):
        tokens = rng.randrange(100, 5000)
        cost.observe(tokens, 0.02 + 1e-5 * tokens + rng.uniform(-0.002, 0.002))
    assert cost.seconds(0) == pytest.approx(0.02, abs=0.004)
    assert cost.seconds(10_000) == pytest.approx(0.12, abs=0.02)


def test_a_link_that_has_become_slower_is_noticed() -> None:
    cost = HandoffCost()
    for seconds in [0.01] * 50 + [0.5] * 50:
        cost.observe(1000, seconds)
    assert cost.seconds(1000) == pytest.approx(0.5, abs=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(-1, 1e4)), max_size=30), st.integers(0, 10**6))
def test_no_handoff_is_expected_to_save_time(seen: list[tuple[int, float]], tokens: int) -> None:
    cost = HandoffCost()
    for sent, seconds in seen:
        cost.observe(sent, seconds)
    assert cost.seconds(tokens) >= -1e-6
    assert cost.seconds(tokens + 1000) >= cost.seconds(tokens) - 1e-6, "more tokens take no less"


def reported(queued_s: float = 0.0, *, trusted: bool = True) -> ReplicaRouter:
    router = ReplicaRouter(1, random.Random(0))
    router.reported(0, LoadReport(queued_s, COST, trusted), 0.0, 0.0)
    return router


def test_a_server_that_was_slow_once_is_tried_again() -> None:
    clock = VirtualClock()
    costs = TransferCosts(clock.now)
    costs.observe("slow", 1000, 20.0)
    costs.observe("fast", 1000, 0.1)
    assert costs.seconds("slow", 1000) == pytest.approx(20.0)
    assert costs.seconds("fast", 1000) == pytest.approx(0.1)
    assert costs.seconds("new", 2000) == 0.0
    clock.advance(FORGET_S - 1)
    costs.observe("fast", 1000, 0.1)
    clock.advance(1.0)
    assert costs.seconds("slow", 1000) == 0.0
    assert costs.seconds("fast", 1000) == pytest.approx(0.1)


def test_a_forecast_is_of_the_queue_before_the_prompt_of_what_is_not_cached_and_of_the_handoff() -> None:
    router = reported(2.0)
    sent = router.choose(PROMPT, "", [0], 0.0)
    assert router.forecast(sent, 0.0) == RemoteForecast(2.0, 0.4)
    router.handed_over(sent, 0.05)
    found = router.forecast(sent, 0.0)
    assert found is not None
    assert found.handoff_s == pytest.approx(0.05)
    later = router.choose(PROMPT, "", [0], 1.0)
    found = router.forecast(later, 1.0)
    assert found is not None
    assert found.queued_s == pytest.approx(1.4), "a second of it is done; the one before counts, which no report has"
    assert found.work_s == pytest.approx(0.016), "its pages are there by then"


def test_nothing_is_forecast_of_a_server_without_a_cost_model() -> None:
    """One that has computed nothing yet, or of an earlier version, or that was started again."""
    silent = ReplicaRouter(1, random.Random(0))
    assert silent.forecast(silent.choose(PROMPT, "", [0], 0.0), 0.0) is None
    fresh = reported(trusted=False)
    assert fresh.forecast(fresh.choose(PROMPT, "", [0], 0.0), 0.0) is None
    again = reported()
    again.reset(0)
    assert again.forecast(again.choose(PROMPT, "", [0], 0.0), 0.0) is None


def test_of_a_stale_report_the_costs_are_kept_and_not_the_queue() -> None:
    router = reported(50.0)
    late = REPORT_S + 1
    router.choose(PROMPT, "", [0], late)
    found = router.forecast(router.choose(PROMPT, "", [0], late), late)
    assert found is not None
    assert found.queued_s == pytest.approx(0.4), "what was sent there is known, and what others sent is not"


def test_short_prompts_wait_less_where_the_policy_says_so() -> None:
    report = LoadReport(60.0, COST, True, ((64, 0.5, 8.0), (256, 2.5, 4.0), (1024, 50.0, 1.0)))
    found = [report.wait(tokens) for tokens in (1, 64, 160, 256, 1024, 9999)]
    assert found == [(0.5, 8.0), (0.5, 8.0), (1.5, 6.0), (2.5, 4.0), (50.0, 1.0), (50.0, 1.0)]
    assert LoadReport(60.0, COST, True).wait(1) == (60.0, 0.0), "of earlier versions the whole queue counts"
    router = ReplicaRouter(1, random.Random(0))
    router.reported(0, report, 0.0, 0.0)
    before = router.choose(pack(range(1000, 1160)), "", [0], 0.0)
    found = router.forecast(before, 0.0)
    assert found is not None
    assert found.queued_s == pytest.approx(1.5)
    found = router.forecast(router.choose(pack(range(64)), "", [0], 0.0), 0.0)
    assert found is not None
    assert found.queued_s == pytest.approx(0.5 + 0.16), "what was sent since counts, too"


def test_a_prompt_that_stays_leaves_nothing_behind() -> None:
    """Neither a queue there, nor pages that later prompts are sent after. Those of prompts that went there stay."""
    router = reported()
    went = router.choose(PROMPT, "", [0], 0.0)
    router.posted(went, 0.0)
    router.done(went)
    longer = router.choose(pack(range(900)), "", [0], 0.0)
    assert longer.work.tokens < 900
    router.withdraw(longer)
    again = router.choose(pack(range(900)), "", [0], 0.0)
    assert again.work == longer.work
    found = router.forecast(again, 0.0)
    assert found is not None
    assert found.queued_s == 0.0
