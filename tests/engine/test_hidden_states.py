"""Hidden states and draft data: those of transformers, with the same bits whatever computes them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import RowHidden
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.collectives.operations import Alone, Collectives
from headrace.engine.runner import ModelRunner
from tests.engine.collectives.threads import run_ranks
from tests.engine.models import (
    CONFIGS,
    VOCABULARY,
    Prompt,
    Saved,
    make_runner,
    random_tokens,
    reference,
    shuffled_pages,
)

LENGTH = 41
TOKENS = random_tokens(LENGTH, seed=5)
PLAIN = SamplingParams(temperature=0.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensor(states: HiddenStates) -> Tensor:
    data = torch.from_numpy(np.frombuffer(states.data, np.uint8).copy()).view(DTYPES[states.dtype])
    return data.view(states.count, states.size)


def whole(reports: Iterable[RowHidden]) -> HiddenStates:
    """Reports of all chunks of a prompt, as one."""
    states = [report.states for report in reports]
    assert [each.start for each in states] == [sum(before.count for before in states[:i]) for i in range(len(states))]
    return HiddenStates(0, states[0].size, states[0].dtype, b"".join(each.data for each in states))


def asking(prompt: Prompt, size: int, **fields: Any) -> list[PlanRow]:
    """Chunks of this size that ask for all of their hidden states."""
    ends = [*range(size, LENGTH, size), LENGTH]
    return [prompt.row(start, end - start, hidden=end - start, **fields) for start, end in zip([0, *ends], ends)]  # noqa: B905


def compute(stages: Sequence[ModelRunner], rows: Sequence[PlanRow]) -> tuple[RowHidden, ...]:
    hidden = None
    for stage in stages:
        hidden = stage.forward(rows, hidden)
    assert hidden is not None
    return stages[-1].sample(rows, hidden).result().hidden


def expected(saved: Saved) -> Tensor:
    """transformers: the last of output_hidden_states is after the final norm."""
    with torch.inference_mode():
        output = saved.model(torch.tensor([TOKENS]), output_hidden_states=True)
    return output.hidden_states[-1][0]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_they_equal_those_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    model = saved(name)
    runner = make_runner(model.folder)
    prompt = Prompt(1, TOKENS, shuffled_pages(4, 64), 16)
    states = whole(report for row in asking(prompt, 17) for report in compute([runner], [row]))
    assert (states.dtype, states.size) == ("float32", 48)
    torch.testing.assert_close(tensor(states), expected(model), atol=3e-4, rtol=3e-4)


@pytest.mark.cpu_kind
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_chunks_batches_stages_and_cached_prefixes_change_no_bit(saved: Callable[[str], Saved], dtype: str) -> None:
    folder = saved("qwen3").folder
    runner = make_runner(folder, dtype=dtype)
    prompt = Prompt(1, TOKENS, shuffled_pages(4, 64), 16)
    states = whole(compute([runner], asking(prompt, LENGTH)))
    for size in (1, 16, 25):
        assert whole(report for row in asking(prompt, size) for report in compute([runner], [row])) == states
    stages = [make_runner(folder, dtype=dtype, layers=layers) for layers in (range(1), range(1, 3))]
    other = Prompt(2, random_tokens(9, seed=9), [60], 16)
    [mine, _] = compute(stages, [*asking(prompt, LENGTH), other.row(0, 9, hidden=9)])
    assert mine.states == states
    compute([runner], [prompt.row(0, 32)])
    [last] = compute([runner], [prompt.row(32, LENGTH - 32, hidden=1)])
    assert last == RowHidden(1, states.at(LENGTH - 1))  # type: ignore[arg-type]


def test_nothing_is_reported_that_was_not_asked_for(saved: Callable[[str], Saved]) -> None:
    runner = make_runner(saved("llama").folder)
    prompt = Prompt(1, TOKENS, shuffled_pages(4, 64), 16)
    result = runner.execute([prompt.row(0, LENGTH, sample=PLAIN)])
    assert (result.hidden, result.samples[0].draft) == ((), None)


@pytest.mark.parametrize("shards", [2, 3])
def test_the_first_shard_reports_all_elements(reshaped: Callable[[str, int, int], Saved], shards: int) -> None:
    """And a greedy row with draft data has all logits gathered."""
    saved = reshaped("qwen2", 6, 3)

    def work(tp: Collectives) -> Any:
        prompt = Prompt(1, TOKENS, shuffled_pages(4, 64), 16)
        row = prompt.row(0, LENGTH, hidden=LENGTH, draft_top_k=5, sample=PLAIN)
        return make_runner(saved.folder, tp=tp).execute([row])

    first, *others = run_ranks(shards, work)
    alone = work(Alone())
    assert not any(other.hidden or other.samples for other in others)
    torch.testing.assert_close(tensor(first.hidden[0].states), expected(saved), atol=3e-4, rtol=3e-4)
    assert first.samples[0].token == alone.samples[0].token
    assert first.samples[0].draft.ids == alone.samples[0].draft.ids


def test_draft_tokens_have_the_probabilities_of_the_model(saved: Callable[[str], Saved]) -> None:
    """Before temperature and filters; a row beside it has none, and one that asks for more than there are has all."""
    model = saved("mistral")
    runner = make_runner(model.folder)
    prompt, other = (Prompt(request, TOKENS, shuffled_pages(4, 64, request), 16) for request in (1, 2))
    sampling = SamplingParams(temperature=0.5, top_k=2, seed=3)
    rows = [prompt.row(0, LENGTH, sample=sampling, draft_top_k=9), other.row(0, LENGTH, sample=PLAIN)]
    asked, plain = runner.execute(rows).samples
    assert plain.draft is None
    assert asked.draft is not None
    probs = reference(model.model, TOKENS)[0][-1].exp()
    best = probs.topk(9)
    assert asked.draft.ids == tuple(best.indices.tolist())
    torch.testing.assert_close(torch.tensor(asked.draft.probs), best.values, atol=1e-4, rtol=1e-4)
    again = runner.execute([prompt.row(0, LENGTH, sample=sampling, draft_top_k=VOCABULARY + 1)]).samples[0].draft
    assert again is not None
    assert sorted(again.ids) == list(range(VOCABULARY))
    assert again.best(9) == asked.draft
