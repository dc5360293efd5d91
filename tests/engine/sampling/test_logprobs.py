"""Prompt logprobs and sampled logprobs as the runner reports them."""

from collections.abc import Callable

import pytest
import torch

from headrace.core.types.requests.request import SamplingParams
from tests.engine.models import Prompt, Saved, make_runner, random_tokens, reference

Models = Callable[[str], Saved]


@pytest.mark.parametrize("chunk", [40, 150])
def test_prompt_logprobs_equal_the_full_softmax(saved: Models, chunk: int) -> None:
    """Over chunks, and over more positions than one slice of logits holds."""
    model = saved("llama")
    runner = make_runner(model.folder)
    prompt = Prompt(3, random_tokens(150), list(range(10)), 16)
    expected, _ = reference(model.model, prompt.tokens)
    found = {}
    for start in range(0, 150, chunk):
        count = min(chunk, 150 - start)
        following = prompt.tokens[start + count] if start + count < 150 else None
        reports = runner.execute([prompt.row(start, count, prompt_logprobs=2, next_token=following)]).prompt_logprobs
        assert reports[0].request == 3
        assert reports[0].runs[0].start == start + 1
        for run in reports[0].runs:
            found.update(enumerate(run.entries(), run.start))
    assert sorted(found) == list(range(1, 150))
    for position, entry in found.items():
        row = expected[position - 1]
        assert entry.token == prompt.tokens[position]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        torch.testing.assert_close(torch.tensor(entry.top_logprobs), row.topk(2).values, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("start", [0, 1, 39, 40, 41, 110, 149])
def test_prompt_logprobs_start_where_they_are_asked_to(saved: Models, start: int) -> None:
    """At chunk edges and between them, the same as without a start."""
    runner = make_runner(saved("llama").folder)
    prompt = Prompt(3, random_tokens(150), list(range(10)), 16)
    whole = runner.execute([prompt.row(0, 150, prompt_logprobs=2)]).prompt_logprobs[0].runs[0].entries()
    found = {}
    for first in range(0, 150, 40):
        count = min(40, 150 - first)
        if first + count < start:
            continue
        following = prompt.tokens[first + count] if first + count < 150 else None
        row = prompt.row(first, count, prompt_logprobs=2, next_token=following, prompt_logprobs_start=start)
        for run in runner.execute([row]).prompt_logprobs[0].runs:
            found.update(enumerate(run.entries(), run.start))
    assert sorted(found) == list(range(max(1, start), 150))
    for position, entry in found.items():
        expected = whole[position - 1]
        assert entry.token == expected.token == prompt.tokens[position]
        assert (entry.logprob, *entry.top_logprobs) == pytest.approx(
            (expected.logprob, *expected.top_logprobs), abs=1e-5
        )


def test_only_rows_that_ask_get_logprobs(saved: Models) -> None:
    runner = make_runner(saved("llama").folder)
    prompts = [Prompt(index, random_tokens(5, index), [index], 16) for index in range(3)]
    wanted = [None, 0, 2]
    rows = [
        prompt.row(0, 5, sample=SamplingParams(temperature=0.0, logprobs=count))
        for prompt, count in zip(prompts, wanted, strict=True)
    ]
    samples, reports, *_ = runner.execute(rows)
    assert reports == []
    assert samples[0].logprob is None
    assert [len(sample.logprob.top_ids) for sample in samples if sample.logprob is not None] == [0, 2]
    assert samples[2].logprob is not None
    assert samples[2].logprob.top_ids[0] == samples[2].token
