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


def test_label_logprobs_are_the_prompt_logprobs_of_the_same_tokens(saved: Models) -> None:
    """Bit for bit: those at the end of a prompt, beside others in one pass and behind a prefix that was computed
    before, and those of the labels as tokens of longer prompts; and transformers' but for rounding."""
    model = saved("llama")
    runner = make_runner(model.folder)
    shared, labels = random_tokens(70), (5, 190, 17)
    runner.execute([Prompt(0, shared, list(range(5)), 16).row(0, 64)])
    items = [[*shared, *random_tokens(9 + index, index)] for index in range(4)]
    prompts = [Prompt(1 + at, item, [0, 1, 2, 3, 6 + 2 * at, 7 + 2 * at], 16) for at, item in enumerate(items)]
    sampling = SamplingParams(temperature=0.0, logprobs=0, label_token_ids=labels)
    rows = [prompt.row(64, len(prompt.tokens) - 64, sample=sampling) for prompt in prompts]
    for item, sample in zip(items, runner.execute(rows).samples, strict=True):
        expected, _ = reference(model.model, item)
        assert sample.logprob is not None
        assert sample.logprob.top_ids == labels
        for label, found in zip(labels, sample.logprob.top_logprobs, strict=True):
            row = Prompt(9, [*item, label], list(range(20, 26)), 16).row(0, len(item) + 1, prompt_logprobs=0)
            (report,) = runner.execute([row]).prompt_logprobs
            assert found == report.runs[-1].entries()[-1].logprob
            assert found == pytest.approx(float(expected[len(item) - 1][label]), abs=2e-4)


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
