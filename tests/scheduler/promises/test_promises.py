"""Promised times to first token: when forecasts are made, what bounds follow, which are kept, and what is refused."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.messages.frontend import QueryForecast, QueryStats
from headrace.core.messages.replies import ForecastReply, Progress, Promised, RequestFinished
from headrace.core.types.forecast import Forecast, LengthSamples, QueueOutlook
from headrace.core.types.requests.request import Discard, SendTo
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.promises.conformal_factor import UNSURE
from headrace.scheduler.promises.promises import DUE_S, FAILED_S
from tests.scheduler.bench import Bench, none, only

COST: Cost = (0.0, 0.05, 0.2)  # a second for a full plan of 16 tokens
WORK_S = 4.0  # of 64 tokens
OUTLOOK = QueueOutlook(1.0, 3.0)


def bench(**changes: object) -> Bench:
    settings = {"policy": "fcfs", "prefix_cache": False, "promise": "p99"}
    found = Bench(up=False, **(settings | changes))
    found.do(found.ready(0, cost=COST))
    return found


def forecast(*ratios: float, took_s: float = 0.01) -> ForecastMade:
    samples = LengthSamples(64, WORK_S, ratios)
    return ForecastMade(
        forecast=Forecast(samples=(samples,), queue=OUTLOOK, one_more=OUTLOOK, horizon_s=60.0, steps=500, took_s=took_s)
    )


def results(found: Bench) -> dict[str, float]:
    counted = {result: found.metric("promises_total", result) for result in ("kept", "broken", "void")}
    return {result: count for result, count in counted.items() if count}


def run(found: Bench, seconds: float) -> None:
    """Compute the next plan, which samples a token, in so many seconds."""
    forward = found.plan()
    assert forward is not None
    found.wait(seconds)
    found.done(forward, *[7 for row in forward.rows if row.sample is not None], seconds=seconds)


def test_nothing_is_promised_before_a_forecast_or_without_the_flag() -> None:
    found = bench()
    assert none(found.submit("a", 16), Promised)
    found.do(forecast(1.0))
    assert only(found.submit("b", 16), Promised).rid == "b"
    off = bench(promise="off")
    assert none(off.submit("a", 16), MakeForecast)
    off.do(forecast(1.0))
    assert none(off.submit("b", 16), Promised)


def test_the_bound_is_the_prediction_times_what_the_twin_has_found() -> None:
    """A prompt of a second behind one of two: three seconds, which took twice as long in the twin; and the factor of
    promises that are not calibrated."""
    found = bench()
    found.submit("a", 32)
    found.do(forecast(1.0, 2.0))
    assert only(found.submit("b", 16), Promised).bound_s == pytest.approx(UNSURE * 2.0 * 3.0)
    assert only(found.submit("c", 16), Promised).bound_s == pytest.approx(UNSURE * 2.0 * 4.0), "b came since"


def test_a_forecast_is_made_for_those_who_ask_while_something_changes() -> None:
    found = bench()
    assert none(found.do(QueryForecast(token=1)), MakeForecast), "nothing has come yet"
    first = only(found.submit("a", 16), MakeForecast)
    found.wait(0.5)
    assert none(found.submit("b", 16), MakeForecast), "one at a time"
    assert none(found.do(forecast(1.0, took_s=0.2)), MakeForecast)
    found.wait(3.4)
    assert none(found.submit("c", 16), MakeForecast), "0.2 s of CPU are a twentieth of 4 s"
    found.wait(0.2)
    assert only(found.do(QueryStats(token=2)), MakeForecast).seed == first.seed + 1
    found.do(forecast(1.0))
    found.wait(100.0)
    assert none(found.do(QueryStats(token=3)), MakeForecast), "nothing has changed"


def test_a_forecast_that_failed_is_not_tried_again_at_once() -> None:
    found = bench()
    found.submit("a", 16)
    found.do(ForecastMade(forecast=None))
    found.wait(FAILED_S - 0.1)
    assert none(found.submit("b", 16), MakeForecast)
    found.wait(0.2)
    assert only(found.submit("c", 16), MakeForecast)
    assert found.metric("forecasts_total", "failed") == 1


def test_the_steps_follow_from_what_the_last_forecast_took() -> None:
    found = bench()
    asked = only(found.submit("a", 16), MakeForecast).steps
    found.do(forecast(1.0, took_s=0.05))  # 500 steps
    found.wait(10.0)
    assert only(found.submit("b", 16), MakeForecast).steps == 2500 != asked


def test_a_promise_is_kept_or_broken_and_the_answer_says_so() -> None:
    found = bench()
    found.submit("first", 16, max_tokens=1, route=Discard())
    found.do(forecast(1.0))
    run(found, 1.0)
    bound_s = only(found.submit("a", 16, max_tokens=1, route=Discard()), Promised).bound_s
    assert bound_s == pytest.approx(UNSURE)
    run(found, 1.2)
    kept = found.finished("a").promise
    assert kept is not None
    assert (kept.bound_s, kept.ttft_s, kept.kept) == (bound_s, pytest.approx(1.2), True)
    found.submit("b", 16, max_tokens=1, route=Discard())
    run(found, 10.0)
    broken = found.finished("b").promise
    assert broken is not None
    assert not broken.kept
    assert results(found) == {"kept": 1, "broken": 1}
    assert found.finished("first").promise is None


def test_a_promise_is_broken_when_its_time_is_over_not_when_the_token_comes() -> None:
    found = bench()
    found.do(forecast(1.0))
    found.submit("a", 16, max_tokens=1, route=Discard())
    found.wait(UNSURE + DUE_S + 0.1)
    found.submit("b", 16)
    assert results(found) == {"broken": 1}
    run(found, 3.0)
    assert results(found) == {"broken": 1}, "it is counted once"
    assert only(found.submit("c", 16), Promised).bound_s > 2.0 * UNSURE, "by what was missed"


def test_who_leaves_before_is_owed_nothing() -> None:
    found = bench()
    found.do(forecast(1.0))
    found.submit("a", 16)
    found.abort("a")
    found.wait(100.0)
    found.submit("b", 16)
    assert results(found) == {"void": 1}


def test_who_leaves_when_the_time_is_over_was_owed_a_token() -> None:
    found = bench()
    found.do(forecast(1.0))
    found.submit("a", 16, max_tokens=1, route=Discard())
    found.wait(UNSURE + 0.1)
    found.abort("a")
    assert results(found) == {"broken": 1}


def test_waiting_for_the_peer_is_not_in_the_promise() -> None:
    found = bench()
    found.do(forecast(1.0))
    found.join()
    found.submit("a", 16, route=SendTo("t"), progress=True)
    found.wait(20.0)
    found.submit("b", 16)
    assert results(found) == {}
    progress = only(found.reserve("t", 16), Progress)
    assert progress.ttft_bound_s == pytest.approx(UNSURE)
    found.abort("b")
    run(found, 1.1)
    assert results(found) == {"void": 1, "kept": 1}


def test_an_objective_is_refused_by_what_can_be_promised() -> None:
    """Sums predict one second; the twin has found that it takes three."""
    found = bench()
    found.submit("a", 16, slo_ttft_s=1.0)
    assert found.ended("a") == 0, "by the prediction, while nothing is promised"
    run(found, 1.0)
    found.do(forecast(3.0))
    found.submit("b", 16, slo_ttft_s=5.9)
    error = found.error("b")
    assert (error.code, error.status) == ("slo_unreachable", 429)
    assert "can be promised within 6.000 s; slo_ttft_ms wants it in 5.900 s" in error.message
    assert error.retry_after_s is not None
    assert found.metric("overload_refusals_total", "objective") == 1
    found.submit("c", 16, slo_ttft_s=6.1)
    assert found.ended("c") == 0
    found.submit("d", 16)
    assert found.ended("d") == 0, "without an objective nothing is refused"


def test_a_prediction_refuses_no_objective_that_can_be_promised() -> None:
    found = bench()
    found.submit("a", 32)
    found.do(forecast(0.2))
    found.submit("b", 16, slo_ttft_s=2.0)
    assert found.ended("b") == 0, "sums say 3 s, the twin 0.6, and as much again is to be sure"


def test_the_report_says_what_would_be_promised() -> None:
    found = bench()
    assert only(found.do(QueryForecast(token=1)), ForecastReply).report.age_s is None
    found.submit("a", 16)
    found.wait(2.0)
    found.do(forecast(1.0))
    report = only(found.do(QueryForecast(token=2)), ForecastReply).report
    assert (report.promise, report.age_s, report.queue, report.one_more) == (0.99, 2.0, OUTLOOK, OUTLOOK)
    assert report.queue_s == pytest.approx(1.0)
    (bound,) = report.bounds
    assert (bound.tokens, bound.ttft_s) == (64, pytest.approx(UNSURE * (1.0 + WORK_S)))
    assert found.metric("ttft_bound_seconds", "64") == bound.ttft_s
    assert found.metric("forecast_queue_seconds", "same", "0.99") == 3.0
    off = bench(promise="off")
    assert only(off.do(QueryForecast(token=1)), ForecastReply).report.promise == 0.0


def test_lengths_between_those_that_were_tried_are_in_between() -> None:
    found = bench(max_model_len=2000, kv_pages=600)
    made = forecast(1.0)
    assert made.forecast is not None
    samples = (LengthSamples(64, 4.0, (1.0,)), LengthSamples(256, 16.0, (3.0,)))
    found.do(ForecastMade(forecast=replace(made.forecast, samples=samples)))
    found.submit("a", 128, max_tokens=1)
    assert found.all(Promised)[-1].bound_s == pytest.approx(UNSURE * 2.0 * 8.0), "half way in logarithms"
    found.submit("b", [1] * 1024, max_tokens=1)
    assert found.all(Promised)[-1].bound_s == pytest.approx(UNSURE * 3.0 * 72.0), "as the longest"
    assert none(found.seen, RequestFinished)
