"""Predicted seconds: additive, learned from plans, robust, deterministic, and distrusted when they are wrong."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.requests.request import Discard
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.cost_model import NOTHING, CostModel, Load
from tests.scheduler.bench import Bench

CHUNK = 512
GPU: Cost = (3.3e-10, 35.7e-6, 8e-3)
CPU: Cost = (4e-8, 1.1e-3, 2e-3)  # attention weighs four times what the default has it


def taken(cost: Cost, load: Load) -> float:
    a, b, c = cost
    return a * load.squares + b * load.tokens + c


def teach(model: CostModel, cost: Cost, plans: int, noise: float = 0.0, longest: int = 20, seed: int = 0) -> None:
    """Plans of prompts of up to so many chunks; one in twenty is held up for a second."""
    rng = random.Random(seed)
    for number in range(plans):
        start = rng.randrange(longest) * CHUNK
        load = Load.between(start, start + rng.choice([CHUNK, CHUNK, CHUNK // 4]))
        seconds = taken(cost, load) * (1 + rng.uniform(-noise, noise))
        model.observe(0, load, seconds + (rng.random() < 0.05 and noise > 0), now=float(number))


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=9).map(sorted))
def test_loads_of_the_parts_of_a_prompt_add_up_exactly(borders: list[int]) -> None:
    total = NOTHING
    for start, end in pairwise(borders):
        total = total.plus(Load.between(start, end))
    assert total == Load.between(borders[0], borders[-1])
    assert total.minus(total) == NOTHING
    assert Load.between(9, 3) == NOTHING


def test_a_measured_model_predicts_what_was_measured() -> None:
    model = CostModel(2, CHUNK)
    model.start([GPU, (GPU[0] / 2, GPU[1] / 2, GPU[2])])
    assert model.first_stage_s(Load.between(0, CHUNK)) == pytest.approx(taken(GPU, Load.between(0, CHUNK)), abs=1e-6)
    assert model.first_stage_s(Load.between(100_000, 100_512)) == pytest.approx(
        taken(GPU, Load.between(100_000, 100_512)), abs=1e-6
    )
    whole, plans = Load.between(0, 100 * CHUNK), 100
    assert model.load_s(whole) == pytest.approx(taken(GPU, whole) + (plans - 1) * GPU[2], abs=1e-6)


def test_the_slowest_stage_decides() -> None:
    model = CostModel(2, CHUNK)
    model.start([(0.0, 2e-5, 0.0), (1e-9, 1e-5, 0.0)])
    assert model.load_s(Load.between(0, 500)) == pytest.approx(500 * 2e-5, abs=1e-6)
    late = Load.between(100_000, 100_500)
    assert model.load_s(late) == pytest.approx(1e-9 * (100_500**2 - 100_000**2) + 500e-5, abs=1e-6)
    assert model.first_stage_s(late) == pytest.approx(500 * 2e-5, abs=1e-6)


@pytest.mark.parametrize("cost", [GPU, CPU, (0.0, 5e-4, 0.0), (1e-12, 1e-6, 1e-4)])
def test_coefficients_are_learned_from_plans(cost: Cost) -> None:
    model = CostModel(1, CHUNK)
    teach(model, cost, 400)
    for start, count in ((0, CHUNK), (0, 64), (9000, CHUNK), (30_000, CHUNK)):
        assert model.first_stage_s(Load.between(start, start + count)) == pytest.approx(
            taken(cost, Load.between(start, start + count)), rel=0.05
        )


def test_one_plan_sets_the_scale() -> None:
    model = CostModel(1, CHUNK)
    model.observe(0, Load.between(0, CHUNK), 4.0, 0.0)
    assert model.first_stage_s(Load.between(0, CHUNK)) == pytest.approx(4.0, rel=0.01)
    assert 4.0 < model.first_stage_s(Load.between(5000, 5000 + CHUNK)) < 8.0, (
        "with the default's relation of attention to the rest"
    )


def test_plans_that_were_held_up_weigh_little() -> None:
    model = CostModel(1, CHUNK)
    teach(model, GPU, 400, noise=0.1)
    for start in (0, 5000):
        right = taken(GPU, Load.between(start, start + CHUNK))
        assert model.first_stage_s(Load.between(start, start + CHUNK)) == pytest.approx(right, rel=0.1), (
            "a second is forty times as long as a plan"
        )


def test_another_speed_is_followed() -> None:
    model = CostModel(1, CHUNK)
    model.start([GPU])
    teach(model, (3 * GPU[0], 3 * GPU[1], 3 * GPU[2]), 500)
    assert model.first_stage_s(Load.between(3000, 3000 + CHUNK)) == pytest.approx(
        3 * taken(GPU, Load.between(3000, 3000 + CHUNK)), rel=0.1
    )


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, CHUNK), st.floats(1e-9, 1e3)), max_size=60))
def test_whatever_is_observed_predictions_are_finite_rounded_and_grow_with_the_load(
    plans: list[tuple[int, int, float]],
) -> None:
    models = [CostModel(1, CHUNK), CostModel(1, CHUNK)]
    for model in models:
        for number, (start, count, seconds) in enumerate(plans):
            model.observe(0, Load.between(start, start + count), seconds, number * 20.0)
    one, other = models
    lengths = [one.load_s(Load.between(0, length)) for length in (1, 100, 5000, 100_000)]
    assert lengths == sorted(lengths)
    assert all(0 <= seconds < 1e12 for seconds in lengths)
    assert lengths == [other.load_s(Load.between(0, length)) for length in (1, 100, 5000, 100_000)]
    assert lengths[1] == round(lengths[1], 6)


def test_keys_keep_their_coefficients_until_predictions_have_moved_far() -> None:
    model = CostModel(1, CHUNK)
    model.start([GPU])
    version, load = model.key_version, Load.between(0, 5000)
    key = model.key_s(load)
    model.observe(0, Load.between(0, CHUNK), 1.05 * model.first_stage_s(Load.between(0, CHUNK)), 0.0)
    assert (model.key_version, model.key_s(load)) == (version, key)
    teach(model, CPU, 100)
    assert model.key_version > version
    assert model.key_s(load) == pytest.approx(model.load_s(load), rel=0.5)


def test_after_ten_minutes_of_wrong_predictions_tokens_decide() -> None:
    model = CostModel(1, CHUNK)
    model.start([GPU])
    rng = random.Random(1)
    load = Load.between(0, CHUNK)
    for number in range(1300):  # times that follow from nothing that the model knows: a fit of them is too low
        assert not model.stale or number > 600
        model.observe(0, load, 10.0 if rng.random() < 0.6 else 0.1, float(number))
    assert model.stale
    short, long = model.load_s(Load.between(0, 1000)), model.load_s(Load.between(20_000, 21_000))
    assert short == long, "the prefix is not looked at"
    for number in range(1300, 2600):
        model.observe(0, load, 6.0, float(number))
    assert not model.stale, "a model that predicts well again is trusted again"


def test_a_minute_of_wrong_predictions_makes_nothing_stale() -> None:
    model = CostModel(1, CHUNK)
    model.start([GPU])
    for number in range(1300):
        off = 5.0 if 500 < number < 560 else 1.0
        model.observe(0, Load.between(0, CHUNK), off * taken(GPU, Load.between(0, CHUNK)), float(number))
    assert not model.stale


def test_the_scheduler_reports_the_seconds_of_what_is_queued() -> None:
    bench = Bench(chunk_tokens=16, pipeline_depth=0, up=False, stages=2, prefix_cache=False)
    for stage in range(2):
        bench.do(bench.ready(stage, cost=(1e-3, 1e-2 * (1 + stage), 0.1)))
    assert bench.metric("unplanned_seconds") == 0
    bench.submit("a", 40, route=Discard())
    assert bench.metric("unplanned_seconds") == pytest.approx(1e-3 * 1600 + (2e-2 + 0.1 / 16) * 40)
    first = bench.plan()
    assert first is not None
    left = 1e-3 * (1600 - 256) + (2e-2 + 0.1 / 16) * 24
    assert bench.metric("unplanned_seconds") == pytest.approx(left)
    took = 2 * (1e-3 * 256 + 2e-2 * 16 + 0.1)
    for stage in range(2):
        bench.done(first, stage=stage, seconds=took)
    assert bench.metric("unplanned_seconds") > left, "plans take twice as long as was measured"
    bench.abort("a")
    assert bench.metric("unplanned_seconds") == 0


def test_the_cost_per_token_predicts_what_loads_take() -> None:
    """That of the stage that takes longest, with its share of a pass's overhead; it is reported to routers."""
    model = CostModel(2, 64)
    model.start([(1e-7, 1e-4, 0.0), (1e-6, 1e-3, 0.0128)])
    a, b = model.per_token
    assert (a, b) == (1e-6, pytest.approx(1e-3 + 0.0128 / 64))
    load = Load.between(100, 1000)
    assert model.load_s(load) == pytest.approx(a * load.squares + b * load.tokens, abs=1e-6)
