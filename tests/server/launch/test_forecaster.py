"""Forecasts in forked children: they come back, beside a scheduler that goes on; one that fails harms nothing."""

import os
import select
import signal
from collections.abc import Iterator

import pytest

from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.types.requests.request import Discard
from headrace.server.launch import forecaster as module
from headrace.server.launch.forecaster import Forecaster
from tests.scheduler.twin.driven import Driven

ORDER = MakeForecast(seed=1, steps=2000)


@pytest.fixture
def driven() -> Driven:
    found = Driven()
    for number in range(30):
        found.submit(f"r{number}", 1000, Discard())
        found.run(0.05)
    return found


@pytest.fixture
def forecaster(driven: Driven) -> Iterator[Forecaster]:
    found = Forecaster(driven.scheduler)
    yield found
    found.close()


def answer(forecaster: Forecaster) -> ForecastMade:
    """Wait as the loop does."""
    for _ in range(1000):
        select.select(forecaster.sockets(), [], [], 10.0)
        if made := forecaster.receive(0.0):
            (found,) = made
            return found
    raise AssertionError("no forecast has come")


def test_a_forecast_comes_while_the_scheduler_goes_on(driven: Driven, forecaster: Forecaster) -> None:
    assert forecaster.apply(ORDER, driven.world.now) == ()
    driven.run(30.0)
    assert driven.scheduler.idle
    found = answer(forecaster).forecast
    assert found is not None
    assert found.samples
    assert found.took_s > 0
    assert forecaster.sockets() == ()
    assert forecaster.next_deadline() is None
    (fork,) = forecaster.statistics().samples
    assert 0 < fork.value < 1


def test_a_killed_child_is_no_forecast(driven: Driven, forecaster: Forecaster) -> None:
    forecaster.apply(MakeForecast(seed=1, steps=1 << 30), driven.world.now)
    child = forecaster._child
    assert child is not None
    os.kill(child._process, signal.SIGKILL)
    assert answer(forecaster).forecast is None
    forecaster.apply(ORDER, driven.world.now)
    assert answer(forecaster).forecast is not None


def test_a_child_that_takes_too_long_ends(
    driven: Driven, forecaster: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.2)
    forecaster.apply(MakeForecast(seed=1, steps=1 << 30), driven.world.now)
    assert answer(forecaster).forecast is None


def test_without_processes_there_is_no_forecast(
    driven: Driven, forecaster: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process() -> int:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    (made,) = forecaster.apply(ORDER, driven.world.now)
    assert made.forecast is None
