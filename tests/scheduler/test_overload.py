"""Refusals of requests that would wait too long: bounds in seconds, objectives, and the time to retry."""

import pytest

from headrace.core.messages.replies import RequestFailed
from headrace.core.messages.stage_events import StageReady
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.state.ttft_prediction import RHO_LIMIT, Prediction
from tests.scheduler.bench import PAGE, Bench, geometry, none

COST: Cost = (0.0, 0.05, 0.2)  # a second for a full plan of 16 tokens


def bench(cost: Cost | None = COST, **changes: object) -> Bench:
    """One stage that measured its cost at the start."""
    found = Bench(up=False, **({"policy": "fcfs", "prefix_cache": False} | changes))
    found.do(
        StageReady(
            stage=0, geometry=geometry(PAGE), fingerprint="f", data_port=1, kv_pages=64, vocab_size=1000, cost=cost
        )
    )
    return found


def refusals(found: Bench) -> dict[str, float]:
    reasons = ("tokens", "requests", "seconds", "predicted_ttft", "objective")
    counted = {reason: found.metric("overload_refusals_total", reason) for reason in reasons}
    return {reason: count for reason, count in counted.items() if count}


def test_an_objective_that_cannot_be_met_is_refused_with_both_times() -> None:
    """Two plans ahead, one of its own: three seconds. Of 120 s, arrivals took 2 + 1."""
    queue = bench()
    queue.submit("a", 32)
    assert queue.ended("a") == 0
    queue.submit("b", 16, slo_ttft_s=2.5)
    error = queue.error("b")
    assert (error.code, error.status, error.field) == ("slo_unreachable", 429, None)
    assert "predicted in 3.000 s" in error.message
    assert "slo_ttft_ms wants it in 2.500 s" in error.message
    assert error.retry_after_s == pytest.approx(0.5 / (1 - 2 / 120), abs=0.001)
    assert queue.metric("request_failures_total", "admission", "slo_unreachable") == 1
    assert refusals(queue) == {"objective": 1}
    queue.submit("c", 16, slo_ttft_s=3.0)
    assert queue.ended("c") == 0, "just in time"


def test_refused_requests_count_in_the_time_to_retry_and_not_in_predictions() -> None:
    queue = bench()
    queue.submit("a", 32)
    for number in range(30):
        queue.submit(f"b{number}", 16, slo_ttft_s=2.5)
    error = queue.error("b29")
    assert error.retry_after_s == pytest.approx(0.5 / (1 - 31 / 120), abs=0.002)
    assert "3.000 s" in error.message
    for number in range(300):
        queue.submit(f"c{number}", 16, slo_ttft_s=2.5)
    assert queue.error("c299").retry_after_s == pytest.approx(0.5 / (1 - RHO_LIMIT), abs=0.001)


def test_what_a_prompt_cannot_do_alone_has_no_time_to_retry() -> None:
    queue = bench()
    queue.submit("a", 48, slo_ttft_s=2.0)
    error = queue.error("a")
    assert error.code == "slo_unreachable"
    assert "takes 3.000 s alone" in error.message
    assert error.retry_after_s is None


def test_cached_tokens_take_no_time() -> None:
    queue = bench(prefix_cache=True)
    queue.submit("a", 33, max_tokens=1)
    for tokens in (16, 16, 1):
        forward = queue.plan()
        assert forward is not None
        queue.done(forward, *[1][: tokens == 1], seconds=COST[1] * tokens + COST[2])
    queue.submit("b", 33, slo_ttft_s=1.0)
    assert queue.ended("b") == 0
    queue.submit("c", [7] * 33, slo_ttft_s=1.0)
    assert queue.error("c").code == "slo_unreachable"


def test_the_server_has_a_limit_and_a_prompt_alone_gets_in_however_long() -> None:
    queue = bench(max_predicted_ttft_s=2.0)
    queue.submit("a", 64)
    assert queue.ended("a") == 0, "four seconds, and nothing else is there"
    queue.submit("b", 8)
    error = queue.error("b")
    assert (error.code, error.status) == ("slo_unreachable", 429)
    assert "predicted in 4.600 s; this server promises 2 s" in error.message
    assert error.retry_after_s == pytest.approx(2.6 / (1 - 4 / 120), rel=0.01)
    assert refusals(queue) == {"predicted_ttft": 1}


def test_the_queue_is_bounded_in_seconds_of_work() -> None:
    queue = bench(max_queued_s=2.5)
    queue.submit("a", 32)
    queue.submit("b", 16)
    error = queue.error("b")
    assert (error.code, error.status) == ("queue_full", 429)
    assert "2.000 s of work are queued; 1.000 s more exceed the limit of 2.5 s" in error.message
    assert error.retry_after_s == pytest.approx(0.5 / (1 - 2 / 120), rel=0.02)
    assert refusals(queue) == {"seconds": 1}
    forward = queue.plan()
    assert forward is not None
    queue.done(forward, seconds=1.0)
    queue.submit("c", 16)
    assert queue.ended("c") == 0, "one second of two is done"


@pytest.mark.parametrize(
    "limits", [{"max_queued_s": 0.1}, {"max_predicted_ttft_s": 0.1}, {}], ids=["seconds", "server", "objective"]
)
def test_before_any_plan_and_while_the_model_is_stale_seconds_refuse_nothing(limits: dict[str, object]) -> None:
    unknown = bench(cost=None, max_queued_tokens=90, **limits)
    unknown.submit("a", 40)
    unknown.submit("b", 40, slo_ttft_s=0.001)
    assert unknown.ended("b") == 0, "the costs of the default are no seconds"
    stale = bench(max_queued_tokens=90, **limits)
    stale.scheduler._state.replicas[0].costs.stale = True
    stale.submit("a", 40)
    stale.submit("b", 40, slo_ttft_s=0.001)
    assert stale.ended("b") == 0
    stale.submit("c", 40, slo_ttft_s=0.001)
    assert stale.error("c").code == "queue_full", "the bound on tokens holds"
    assert refusals(stale) == {"tokens": 1}
    trusted = bench(max_queued_tokens=90, **limits)
    trusted.submit("a", 40)
    trusted.submit("b", 40, slo_ttft_s=0.001)
    assert trusted.error("b").status == 429


def test_objectives_may_order_alone() -> None:
    queue = bench(refuse_unreachable=False)
    queue.submit("a", 32)
    queue.submit("b", 16, slo_ttft_s=0.1)
    assert queue.ended("b") == 0


def test_a_fetched_prompt_is_not_computed_and_not_predicted() -> None:
    queue = bench(max_predicted_ttft_s=0.1, max_queued_s=0.1)
    queue.prefill_up()
    queue.submit("a", 32)
    assert none(queue.submit("b", 32, route=FetchFrom("p", "t"), slo_ttft_s=0.1), RequestFailed)


def test_predictions_are_compared_with_what_came() -> None:
    queue = bench()
    queue.submit("a", 16, max_tokens=1)
    forward = queue.plan()
    assert forward is not None
    queue.now += 2.0
    queue.done(forward, 1, seconds=2.0)
    histograms = {found.name: found for found in queue.scheduler.statistics(queue.now).histograms}
    assert histograms["predicted_ttft_seconds"].sum == pytest.approx(1.0)
    error = histograms["ttft_prediction_error"]
    assert error.sum == pytest.approx(-0.5), "a second was predicted, and it took two"
    assert sum(error.counts) == 1
    assert error.bounds[0] < 0 < error.bounds[-1]


def test_the_time_to_retry_is_bounded() -> None:
    assert Prediction(1.0, 1.0, 1.0, 0.0, rho=0.0).retry_after_s(0.5) == 0.5
    assert Prediction(1.0, 1.0, 1.0, 0.0, rho=RHO_LIMIT).retry_after_s(0.5) == pytest.approx(5.0)
