"""Biases and penalties: against one row in plain Python and transformers' processors, whatever the batch, the chunks
and the tokens that were generated before."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.sampling.adjusted import ROOM, LogitAdjustments
from tests.engine.models import VOCABULARY, Prompt, Saved, make_runner, random_tokens

Models = Callable[[str], Saved]
SIZE = 31
PENALTY = st.sampled_from([0.0, 0.7, -1.3, 2.0])
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 100.0]),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
)


def by_hand(logits: Sequence[float], params: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    """One row, one token at a time, in float32."""
    result = [np.float32(logit) for logit in logits]
    for token, bias in params.logit_bias:
        result[token] += np.float32(bias)
    for token in {*prompt, *generated}:
        factor = np.float32(params.repetition_penalty)
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(generated).items():
        result[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        result[token] -= np.float32(params.presence_penalty)
    return [float(logit) for logit in result]


def row_of(
    request: int, params: SamplingParams | None, prompt: list[int], before: list[int], *, begins: bool = True
) -> PlanRow:
    """A row that samples, as the planner makes it."""
    history = None
    if begins and params is not None and params.penalizes:
        history = TokenHistory(pack(prompt) if params.repetition_penalty != 1 else b"", pack(before))
    return PlanRow(request, 0, 1, b"", sample=params, history=history)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=200, deadline=None)
@given(requests=st.lists(st.tuples(PARAMS, TOKENS, TOKENS, TOKENS), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_every_row_of_a_batch_follows_the_reference(
    requests: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    """To the bit, and with tokens generated before the first row, elsewhere, and after it, here."""
    adjustments = LogitAdjustments()
    alone = [LogitAdjustments() for _ in requests]
    for step in range(1 + max(len(later) for *_, later in requests)):
        logits = random_logits(len(requests), seed + step)
        rows = [
            row_of(number, params, prompt, before, begins=not step)
            for number, (params, prompt, before, _) in enumerate(requests)
        ]
        given_logits = logits.clone()
        adjusted = adjustments.adjust(logits, rows)
        assert torch.equal(logits, given_logits)
        for number, (params, prompt, before, later) in enumerate(requests):
            expected = by_hand(logits[number].tolist(), params, prompt, before + later[:step])
            assert adjusted[number].tolist() == expected
            own = slice(number, number + 1)
            assert alone[number].adjust(logits[own], rows[own])[0].tolist() == expected
        samples = [
            SampledToken(number, later[step]) for number, (*_, later) in enumerate(requests) if step < len(later)
        ]
        adjustments.accept(samples)
        for sampled in samples:
            alone[sampled.request].accept([sampled])


@given(tokens=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=20), factor=st.sampled_from([0.5, 1.2, 3.0]))
def test_penalties_and_biases_are_those_of_transformers(tokens: list[int], factor: float) -> None:
    logits = random_logits(1, len(tokens))
    repeats = SamplingParams(repetition_penalty=factor)
    expected = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([tokens]), logits.clone())
    for cut in (0, len(tokens) // 2, len(tokens)):  # part of them generated
        found = LogitAdjustments().adjust(logits, [row_of(0, repeats, tokens[:cut], tokens[cut:])])
        assert torch.equal(found, expected)
    biases = {token: token - 7.5 for token in tokens}
    expected = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])(
        torch.tensor([tokens]), logits.clone()
    )
    biased = SamplingParams(logit_bias=tuple(biases.items()))
    assert torch.equal(LogitAdjustments().adjust(logits, [row_of(0, biased, [], [])]), expected)


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    logits = random_logits(2, 0)
    rows = [row_of(0, SamplingParams(), [], []), row_of(1, None, [], [])]
    assert LogitAdjustments().adjust(logits, rows) is logits


def test_more_tokens_than_there_was_room_for() -> None:
    adjustments = LogitAdjustments()
    params = SamplingParams(frequency_penalty=1.0)
    logits = torch.zeros(1, 5 * ROOM)
    adjustments.adjust(logits, [row_of(0, params, [], [])])
    for token in range(5 * ROOM):
        for _ in range(1 + token % 3):
            adjustments.accept([SampledToken(0, token)])
    expected = [-(1.0 + token % 3) for token in range(5 * ROOM)]
    assert adjustments.adjust(logits, [row_of(0, params, [], [], begins=False)])[0].tolist() == expected


def test_nothing_is_kept_of_a_request_that_was_released() -> None:
    adjustments = LogitAdjustments()
    params = SamplingParams(frequency_penalty=1.0, logit_bias=((3, 1.0),))
    adjustments.adjust(random_logits(1, 0), [row_of(0, params, [], [4])])
    adjustments.release(0)
    again = adjustments.adjust(torch.zeros(1, SIZE), [row_of(0, SamplingParams(presence_penalty=1.0), [], [5])])
    assert again[0].nonzero()[:, 0].tolist() == [5]


def test_logits_that_are_not_finite_stay_so() -> None:
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=0.01, logit_bias=((0, -100.0), (1, 100.0)))
    logits = torch.tensor([[torch.inf, -torch.inf, torch.nan]])
    (found,) = LogitAdjustments().adjust(logits, [row_of(0, params, [0, 1, 2], [0, 1, 2])])
    assert found[0] == torch.inf
    assert found[1] == -torch.inf
    assert found[2].isnan()


def greedy_texts(model: Saved, prompts: Sequence[list[int]], params: Sequence[SamplingParams], cuts: list[int]) -> None:
    """Texts of several rows in one batch, each with its own parameters, are those of transformers' own logits. Each
    time as many tokens as cuts says were generated, all requests begin again, as after a preemption."""
    runner = make_runner(model.folder)
    texts = [list(prompt) for prompt in prompts]
    ends = [0, *cuts]
    for again, (first, last) in enumerate(pairwise(ends)):
        requests = [
            Prompt(10 * again + number, list(text), list(range(8 * number, 8 * number + 8)), 16)
            for number, text in enumerate(texts)
        ]
        for request in requests:  # chunks of the prompt; the last one samples
            for start in range(0, len(request.tokens) - 1, 7):
                runner.execute([request.row(start, min(7, len(request.tokens) - 1 - start), sample=None)])
        for step in range(first, last):
            rows = []
            for request, text, prompt, each in zip(requests, texts, prompts, params, strict=True):
                history = TokenHistory(pack(prompt), pack(text[len(prompt) :])) if step == first else None
                fields = {} if step == first else {"tokens": b""}
                rows.append(request.row(len(text) - 1, 1, sample=each, generated=step, history=history, **fields))
            for text, sampled in zip(texts, runner.execute(rows).samples, strict=True):
                text.append(sampled.token)
        for request in requests:
            runner.release(request.request)
    for text, prompt, each in zip(texts, prompts, params, strict=True):
        expected = list(prompt)
        for _ in range(cuts[-1]):
            with torch.inference_mode():
                logits = model.model(torch.tensor([expected])).logits[0, -1].float()
            adjusted = by_hand(logits.tolist(), each, prompt, expected[len(prompt) :])
            expected.append(int(torch.tensor(adjusted).argmax()))
        assert text == expected


def test_texts_are_those_of_transformers(saved: Models) -> None:
    """Prompts in chunks, four kinds of rows in a batch, and requests that begin again with what they have generated."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=2.0, logit_bias=((5, 9.0), (6, 8.5))),
    ]
    prompts = [random_tokens(20 + number, number) for number in range(len(params))]
    greedy_texts(saved("llama"), prompts, params, [5, 12, 24])


def test_transformers_generates_the_same_text(saved: Models) -> None:
    model = saved("qwen2")
    prompt = random_tokens(25, 3)
    generated = model.model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=20,
        repetition_penalty=1.4,
        pad_token_id=0,
        eos_token_id=[],
    )
    runner = make_runner(model.folder)
    request = Prompt(1, prompt, list(range(8)), 16)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4)
    text = list(prompt)
    row = request.row(0, len(prompt), sample=params, history=TokenHistory(pack(prompt)))
    while True:
        text.append(runner.execute([row]).samples[0].token)
        if len(text) == len(prompt) + 20:
            break
        row = request.row(len(text) - 1, 1, tokens=b"", sample=params)
    assert text == generated[0].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_are_of_the_logits_as_the_model_gave_them(saved: Models, seed: int) -> None:
    """As vLLM's are by default."""
    runner = make_runner(saved("llama").folder)
    tokens = random_tokens(12, seed)
    plain = SamplingParams(temperature=0.0, logprobs=VOCABULARY)
    biased = SamplingParams(temperature=0.0, logprobs=VOCABULARY, logit_bias=((seed, 100.0),), presence_penalty=2.0)
    rows = [
        Prompt(0, tokens, [0], 16).row(0, 12, sample=plain),
        Prompt(1, tokens, [1], 16).row(0, 12, sample=biased, history=TokenHistory()),
    ]
    first, second = runner.execute(rows).samples
    assert first.logprob is not None
    assert second.logprob is not None
    assert second.token == seed != first.token
    assert dict(zip(second.logprob.top_ids, second.logprob.top_logprobs, strict=True)) == dict(
        zip(first.logprob.top_ids, first.logprob.top_logprobs, strict=True)
    )
    assert second.logprob.logprob < -1
