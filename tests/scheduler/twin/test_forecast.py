"""Forecasts: the queue over the next minute, what one more server changes, and samples by length."""

from collections.abc import Callable

import pytest

from headrace.core.messages.forecasts import ForecastMade
from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import Promised
from headrace.core.runtime.forked import ForkFailed, run_forked
from headrace.core.types.forecast import HORIZON_S, Forecast
from headrace.core.types.requests.request import Discard, SamplingParams, SendTo
from headrace.scheduler.promises.promises import LENGTHS
from headrace.scheduler.recording.snapshot import decode, encode
from headrace.scheduler.twin.forecast import make_forecast
from tests.scheduler.twin.driven import COST, Driven

STEPS = 2000
CHUNK = 4096
TOKENS = 4000
WORK_S = (COST[1] + COST[2] / CHUNK) * TOKENS + COST[0] * TOKENS**2


def copied(function: Callable[[], bytes]) -> bytes:
    return run_forked(function, 30.0)


def under_load(load: float, seconds: float = 40.0, seed: int = 0) -> Driven:
    """A server to which so many seconds of work have come a second."""
    driven = Driven(seed=seed, chunk_tokens=CHUNK)
    while driven.world.now < seconds:
        driven.submit(f"r{driven.world.now}", TOKENS, SendTo(f"t{driven.world.now}"), max_tokens=2)
        driven.run(driven.drawing.expovariate(load / WORK_S))
    return driven


def forecast(driven: Driven, steps: int = STEPS, seed: int = 1) -> Forecast:
    return make_forecast(driven.scheduler, driven.world.now, seed, steps, copied)


@pytest.mark.full
def test_a_queue_that_grows_is_seen_to_grow_and_one_more_server_helps() -> None:
    driven = under_load(1.5)
    queued_s = driven.scheduler.state.unplanned_s
    assert queued_s > 10
    found = forecast(driven, 8000)
    assert found.queue is not None
    assert found.one_more is not None
    assert found.horizon_s == HORIZON_S
    assert found.queue.p99_s == pytest.approx(queued_s + 0.5 * HORIZON_S, rel=0.35)
    assert found.one_more.p99_s <= queued_s
    assert found.one_more.p50_s == pytest.approx(queued_s - 0.25 * HORIZON_S / 2, rel=0.5)


def test_an_idle_server_has_samples_as_of_prompts_alone() -> None:
    driven = under_load(0.2)
    driven.run(200.0)
    driven.scheduler.state.promises.recent.arrivals.clear()
    found = forecast(driven)
    assert [each.tokens for each in found.samples] == [*LENGTHS]
    for each in found.samples:
        (ratio,) = each.ratios
        assert ratio == pytest.approx(1.0, abs=0.1)
    assert found.queue is not None
    assert found.queue.p99_s == 0.0


@pytest.mark.full
def test_equal_seeds_give_equal_forecasts() -> None:
    driven = under_load(0.9)
    one, again, other = forecast(driven), forecast(driven), forecast(driven, seed=2)
    assert one == again != other
    assert one.steps <= STEPS * 1.01


def test_few_steps_look_less_far_ahead() -> None:
    driven = under_load(0.9)
    found = forecast(driven, 600)
    assert 0 < found.horizon_s < HORIZON_S
    assert len(found.samples) == len(LENGTHS)


def test_a_copy_that_fails_is_no_forecast() -> None:
    def no_copy(_function: Callable[[], bytes]) -> bytes:
        raise ForkFailed("no memory")

    driven = under_load(0.5)
    with pytest.raises(ForkFailed):
        make_forecast(driven.scheduler, driven.world.now, 1, STEPS, no_copy)


def test_a_snapshot_goes_on_with_equal_promises() -> None:
    """What recordings keep of promises is all that they depend on."""
    driven = under_load(0.9, seconds=10.0)
    driven.driver.handle(ForecastMade(forecast=forecast(driven)))
    for number in range(10):
        driven.submit(f"s{number}", TOKENS)
    restored = decode(encode(driven.scheduler))
    submit = Submit(rid="it", prompt=bytes(400), sampling=SamplingParams(max_tokens=1), route=Discard())
    expected = [each for each in driven.scheduler.handle(submit, driven.world.now) if isinstance(each, Promised)]
    assert [each for each in restored.handle(submit, driven.world.now) if isinstance(each, Promised)] == expected
    assert len(expected) == 1
