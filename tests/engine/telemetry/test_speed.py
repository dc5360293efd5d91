"""Fitting the cost of a stage."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import EngineConfig, ModelConfig
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner
from headrace.engine.stub.runner import StubRunner
from headrace.engine.telemetry.speed import LENGTHS as SHARES
from headrace.engine.telemetry.speed import REPEATS, Cost, fit, measure
from tests.engine.models import Saved

LENGTHS = (128, 256, 512, 1024, 2048)


@given(st.floats(1e-9, 1e-6), st.floats(1e-6, 1e-3), st.floats(1e-4, 1))
def test_an_exact_quadratic_is_found(a: float, b: float, c: float) -> None:
    cost = fit([(length, a * length**2 + b * length + c) for length in LENGTHS])
    for length in (64, 700, 4096):
        expected = a * length**2 + b * length + c
        assert cost[0] * length**2 + cost[1] * length + cost[2] == pytest.approx(expected, rel=1e-3)


@given(st.lists(st.floats(1e-6, 10), min_size=5, max_size=5))
def test_no_coefficient_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    assert all(value >= 0 for value in fit(list(zip(LENGTHS, seconds, strict=True))))


def test_a_line_has_no_square_also_with_noise() -> None:
    noise = (1.02, 0.99, 1.01, 0.995, 0.98)
    cost: Cost = fit([(n, (1e-4 * n + 0.01) * off) for n, off in zip(LENGTHS, noise, strict=True)])
    assert cost[0] == 0
    assert cost[1] == pytest.approx(1e-4, rel=0.1)


def test_a_stub_takes_the_time_that_it_was_told() -> None:
    model = ModelConfig(model="stub:layers=4,us_per_token=100,us_per_plan=3000,max_len=512", device="cpu")
    made = StubRunner(plan_rank(model, EngineConfig(kv_pages=40), layers=range(2, 4)))
    started = time.perf_counter()
    assert measure(made, 64, 512, first=False) is not None
    taken = time.perf_counter() - started
    told = REPEATS * sum(0.5 * (share * 64 * 100 + 3000) * 1e-6 for share in SHARES)
    assert taken >= told, "a busy machine makes it slower, and nothing makes it faster"
    assert measure(made, 64, 20, first=False) is None, "one length is too few"


def test_a_model_is_measured_at_the_lengths_that_fit(saved: Callable[[str], Saved]) -> None:
    made = ModelRunner(
        plan_rank(ModelConfig(model=str(saved("llama").folder), device="cpu"), EngineConfig(kv_pages=64), 64)
    )
    ticks: Iterator[int] = count()
    cost = measure(made, 32, 64, first=True, clock=lambda: float(next(ticks)))
    assert cost is not None
    assert cost == pytest.approx((0, 0, 1), abs=1e-6), "every plan took one tick"
