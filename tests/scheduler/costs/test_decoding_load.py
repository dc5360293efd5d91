"""How many requests decode while a prompt is computed: beside many simulated futures of a queue without a limit."""

import heapq
import random

import pytest

from headrace.scheduler.costs.decoding_load import WEIGHT, DecodingLoad

RATE, LIFETIME = 2.0, 4.0  # requests a second, mean seconds for which one decodes: 8 on average


def observed(seconds: float, rng: random.Random) -> tuple[DecodingLoad, float]:
    """So many seconds of arrivals, and when the last one was."""
    load, ends, now = DecodingLoad(), [], 0.0
    while (now := now + rng.expovariate(RATE)) < seconds:
        while ends and ends[0] <= now:
            at = heapq.heappop(ends)
            load.changed(len(ends), 1, at)
        heapq.heappush(ends, now + rng.expovariate(1 / LIFETIME))
        load.changed(len(ends), 0, now)
    return load, now


def future(present: int, seconds: float, rng: random.Random) -> float:
    """Mean number over the next seconds, of which so many are there now."""
    found = sum(min(seconds, rng.expovariate(1 / LIFETIME)) for _ in range(present))
    at = rng.expovariate(RATE)
    while at < seconds:
        found += min(seconds - at, rng.expovariate(1 / LIFETIME))
        at += rng.expovariate(RATE)
    return found / seconds


@pytest.mark.parametrize("present", [0, 8, 30])
def test_the_expected_number_is_the_mean_of_many_futures(present: int) -> None:
    rng = random.Random(present)
    load, now = observed(3000, rng)
    load.changed(present, 0, now)
    for seconds in (0.01, 1.0, 5.0, 60.0):
        exact = sum(future(present, seconds, rng) for _ in range(2000)) / 2000
        assert load.expected(seconds, now) == pytest.approx(exact, rel=0.15, abs=0.3)
    assert load.delayed(5.0, now) == WEIGHT * load.expected(5.0, now)


def test_before_one_has_ended_those_that_decode_now_are_all_that_is_known() -> None:
    load = DecodingLoad()
    assert load.expected(10.0, 5.0) == 0
    load.changed(3, 0, 6.0)
    assert load.expected(10.0, 7.0) == load.expected(0.0, 7.0) == 3
    load.changed(2, 1, 7.0)
    assert 0 < load.expected(1.0, 7.0) < 2.5


def test_a_place_that_was_empty_for_long_is_forgotten_to_have_been_busy() -> None:
    load, now = observed(600, random.Random(1))
    load.changed(0, 0, now)
    assert load.expected(10.0, now) > 3
    assert load.expected(10.0, now + 3600) < 0.5
