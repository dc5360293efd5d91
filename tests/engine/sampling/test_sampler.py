"""Sampling against a plain reference on one row, and what must hold whatever the batch."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.requests.request import SamplingParams
from headrace.engine.sampling.logprobs import sampled_logprobs
from headrace.engine.sampling.sampler import NO_TOKEN, Sampler, SampleRow, seeded_uniform

SIZE = 23
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


def reference(logits: list[float], params: SamplingParams, uniform: float) -> int:
    """One row, one token at a time, in plain Python."""
    best = max(range(SIZE), key=lambda token: (logits[token], -token))
    if params.temperature < 1e-5:
        return best
    weights = {token: math.exp((logit - logits[best]) / params.temperature) for token, logit in enumerate(logits)}
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    order = sorted(weights, key=lambda token: -logits[token]) if filtered else list(range(SIZE))
    order = [token for token in order if weights[token] >= params.min_p]  # the best one weighs 1
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass / total >= params.top_p:
            break
        kept.append(token)
        mass += weights[token]
    running, target = 0.0, uniform * mass
    for token in kept:
        running += weights[token]
        if running > target:
            return token
    return kept[-1]


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, rows: list[SampleRow], seed: int = 0) -> list[int]:
    return Sampler(random.Random(seed)).sample(logits, rows).tolist()


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(st.tuples(params_of, st.integers(0, 5000)), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_every_row_of_a_batch_follows_the_reference(batch: list[tuple[SamplingParams, int]], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    rows = [SampleRow(params, position, 0) for params, position in batch]
    tokens = sample(logits, rows)
    for row, (params, position) in enumerate(batch):
        assert params.seed is not None
        expected = reference(logits[row].tolist(), params, seeded_uniform(params.seed, position))
        assert tokens[row] == expected
        assert sample(logits[row : row + 1], rows[row : row + 1]) == [expected]  # alone as in company


WIDE = 5003
filtered_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 50, 64, 65, 700, 5002, 9000]),
    top_p=st.sampled_from([0.013, 0.37, 0.93, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.13]),
    seed=st.integers(0, 2**64 - 1),
).filter(lambda params: params.top_k or params.top_p < 1.0 or params.min_p)


def sorted_whole(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """The token of one row by putting its whole vocabulary in order."""
    ordered, ids = logits.sort(descending=True, stable=True)
    weights = torch.softmax(ordered.double() / params.temperature, -1)
    weights[weights < params.min_p * weights[0]] = 0.0
    weights[params.top_k or WIDE :] = 0.0
    weights /= weights.sum()
    if params.top_p < 1.0:
        weights[weights.cumsum(0) - weights >= params.top_p] = 0.0
    running = weights.cumsum(0)
    return int(ids[torch.searchsorted(running, uniform * running[-1], right=True)])


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(filtered_of, st.sampled_from([0.0, 0.05, 1.0, 4.0, 30.0])), min_size=1, max_size=4),
    levels=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 99),
)
def test_a_part_of_the_order_gives_the_tokens_of_all_of_it(
    batch: list[tuple[SamplingParams, float]], levels: int, seed: int
) -> None:
    """From the first ranks alone to all of them, with many equal logits (levels in each unit) and without."""
    logits = torch.randn(len(batch), WIDE, generator=torch.Generator().manual_seed(seed))
    logits *= torch.tensor([scale for _, scale in batch])[:, None]
    if levels:
        logits = (logits * levels).round() / levels
    rows = [SampleRow(params, 11, 0) for params, _ in batch]
    tokens = sample(logits, rows)
    for row, (params, _) in enumerate(batch):
        assert params.seed is not None
        expected = sorted_whole(logits[row], params, seeded_uniform(params.seed, 11))
        assert tokens[row] == expected
        assert sample(logits[row : row + 1], rows[row : row + 1]) == [expected]


def test_unseeded_draws_follow_the_distribution() -> None:
    logits = random_logits(1, 4)
    rows = [SampleRow(SamplingParams(temperature=0.8), 0, 0)] * 4000
    counts = Counter(sample(logits.expand(4000, -1), rows))
    for token, probability in enumerate(torch.softmax(logits[0] / 0.8, -1).tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.035


def test_seeded_numbers_are_uniform_and_depend_on_both() -> None:
    numbers = [seeded_uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(numbers)) == 2000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.02


def test_equal_logits_keep_the_order_of_ids() -> None:
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)
    assert sample(torch.zeros(1, SIZE), [SampleRow(params, 3, 0)]) == [0]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 5.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1, 3, 99))
    assert [sample(logits, [SampleRow(params, 0, generated)])[0] for generated in (0, 1, 2)] == [2, 2, 1]
    assert logits[0, 1] == 9.0  # the caller's logits stay


BAD_ROWS = {
    "one NaN": [0.0, math.nan, 2.0, 5.0],
    "all NaN": [math.nan] * 4,
    "an infinity": [0.0, math.inf, 2.0, 5.0],
    "NaN and infinity": [math.nan, math.inf, 2.0, -math.inf],
    "nothing but minus infinity": [-math.inf] * 4,
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@settings(max_examples=30, deadline=None)
@given(params=params_of, others=params_of, place=st.integers(0, 2))
def test_rows_that_are_not_finite_have_no_token(
    bad: list[float], params: SamplingParams, others: SamplingParams, place: int
) -> None:
    """With any parameters; other rows of the batch are not affected."""
    good = torch.tensor([[1.0, 2.0, 0.5, -math.inf], [0.0, 3.0, 3.0, 1.0]])
    rows = [SampleRow(others, position, 0) for position in (4, 5)]
    expected = sample(good, rows)
    logits = torch.cat((good[:place], torch.tensor([bad]), good[place:]))
    rows.insert(place, SampleRow(params, 9, 0))
    expected.insert(place, NO_TOKEN)
    assert sample(logits, rows) == expected


def test_a_forbidden_stop_token_with_nan_is_found_too() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, min_tokens=2, stop_token_ids=(1,), seed=3)
    early = SampleRow(params, 0, 0)
    hidden, rest = [0.0, math.nan, -50.0], [0.0, 9.0, -math.inf]
    assert sample(torch.tensor([hidden, rest]), [early, early]) == [NO_TOKEN, 0]
    everything = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=(0, 1, 2))
    assert sample(torch.tensor([rest]), [SampleRow(everything, 0, 0)]) == [NO_TOKEN]


def test_logprobs_that_are_infinite_are_told_as_the_lowest_number() -> None:
    logits, wanted = torch.tensor([[0.0, -math.inf, 1.0]]), [SamplingParams(logprobs=3)]
    (entry,) = sampled_logprobs(logits, torch.tensor([1]), wanted)([1])
    assert entry is not None
    lowest = torch.finfo(torch.float32).min
    assert (entry.logprob, entry.top_ids[2], entry.top_logprobs[2]) == (lowest, 1, lowest)


def test_logprobs_are_of_the_unscaled_logits() -> None:
    logits = random_logits(3, 7)
    tokens = [5, 0, 22]
    wanted = [SamplingParams(logprobs=count) for count in (0, 2, SIZE + 9)]
    entries = sampled_logprobs(logits, torch.tensor(tokens), wanted)(tokens)
    expected = torch.log_softmax(logits, -1)
    assert [entry.token for entry in entries] == [5, 0, 22]
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[row, entry.token]), abs=1e-6)
    assert entries[0].top_ids == ()
    assert len(entries[1].top_ids) == 2
    assert sorted(entries[2].top_ids) == list(range(SIZE))
    assert list(entries[2].top_logprobs) == sorted(entries[2].top_logprobs, reverse=True)
    assert entries[1].top_logprobs[0] == pytest.approx(float(expected[1].max()), abs=1e-6)


def test_labels_take_the_place_of_the_most_likely_tokens() -> None:
    """In the order in which they are asked for, beside rows with others, and bit for bit the log-softmax."""
    logits, tokens = random_logits(4, 8), [5, 0, 22, NO_TOKEN]
    labels = [(), (7, 3), (22, 1, 0), (4,)]
    wanted = [SamplingParams(logprobs=2, label_token_ids=each) for each in labels]
    entries = sampled_logprobs(logits, torch.tensor(tokens), wanted)(tokens)
    expected = torch.log_softmax(logits, -1)
    assert [entry and entry.top_ids for entry in entries] == [
        (*expected[0].topk(2).indices.tolist(),),
        *labels[1:3],
        None,
    ]
    for row, entry in enumerate(entries[:3]):
        assert entry is not None
        assert list(entry.top_logprobs) == [float(expected[row, label]) for label in entry.top_ids]
        assert entry.logprob == float(expected[row, tokens[row]])
