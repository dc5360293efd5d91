"""Arrivals and prompts: the same for a seed, as asked, with the prefixes shared that should be."""

import random
import statistics
from itertools import pairwise

import pytest

from headrace.tools.bench.workload import BURST, Lengths, arrival_times, cut, synthetic, token_ids, warmup


def gaps(rate: float, burstiness: float) -> list[float]:
    times = arrival_times(20_000, rate, burstiness, random.Random(1))
    assert times[0] == 0
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float, variation: float) -> None:
    found = gaps(8.0, burstiness)
    assert statistics.fmean(found) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.05)


def test_a_burst_comes_at_once() -> None:
    assert arrival_times(3, BURST, 1.0, random.Random(1)) == [0.0, 0.0, 0.0]


def test_prompts_share_their_prefixes_and_nothing_else() -> None:
    requests = synthetic(40, Lengths(50, 90), Lengths(3, 9), 32, 2, random.Random(5))
    prompts = [token_ids(request, 5) for request in requests]
    assert [len(prompt) for prompt in prompts] == [request.input_tokens for request in requests]
    assert min(map(len, prompts)) < 55 < 85 < max(map(len, prompts)) <= 90
    assert {request.output_tokens for request in requests} == set(range(3, 10))
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 2
    assert len({tuple(prompt[32:48]) for prompt in prompts}) == 40
    assert prompts == [token_ids(request, 5) for request in requests]
    assert prompts != [token_ids(request, 6) for request in requests]


def test_the_beginning_of_a_longer_text_is_the_shorter_text() -> None:
    (request,) = synthetic(1, Lengths(1000, 1000), Lengths(1, 1), 0, 1, random.Random(5))
    for most in (1, 2, 7, 500, 999):
        assert token_ids(cut([request], most)[0], 3) == token_ids(request, 3)[:most]


def test_cutting_keeps_the_shared_prefix() -> None:
    requests = synthetic(2, Lengths(100, 100), Lengths(1, 1), 60, 1, random.Random(5))
    one, other = (token_ids(request, 5) for request in cut(requests, 40))
    assert one == other
    assert len(one) == 40


def test_warm_up_prompts_are_as_long_and_share_nothing() -> None:
    requests = synthetic(3, Lengths(64, 80), Lengths(1, 1), 64, 1, random.Random(5))
    warm = warmup(requests, 4)
    assert [each.input_tokens for each in warm] == [requests[number % 3].input_tokens for number in range(4)]
    starts = {tuple(token_ids(each, 5)[:16]) for each in [*warm, requests[0]]}
    assert len(starts) == 5
