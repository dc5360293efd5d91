"""NaN and infinite numbers in weights or pages: their requests are reported, and others are not affected."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.runner import ModelRunner
from tests.engine.models import CONFIGS, Prompt, Saved, make_runner, random_tokens, save_model, shuffled_pages

Models = Callable[[str], Saved]
BAD = 5  # the token whose embedding is NaN
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=3),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.1, seed=1, min_tokens=4, stop_token_ids=(1, 2)),
]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the embedding of one token is NaN; its head is not tied to the embeddings."""
    folder = tmp_path_factory.mktemp("nan")
    saved = save_model(CONFIGS["mistral"], folder)
    with torch.no_grad():
        saved.model.get_input_embeddings().weight[BAD] = torch.nan
    saved.model.save_pretrained(folder)
    return folder


def prompts(lengths: list[int]) -> Iterator[Prompt]:
    """None of them has the bad token."""
    pages = shuffled_pages(60, 64, seed=3)
    for index, length in enumerate(lengths):
        tokens = [token if token != BAD else BAD + 1 for token in random_tokens(length, seed=index)]
        yield Prompt(index, tokens, pages[index * 12 : index * 12 + 12], 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("start", "count"), [(0, 40), (0, 20), (7, 1)], ids=["prompt", "chunk", "token"])
def test_a_bad_row_among_chunks_and_decoding_rows(
    folder: Path, params: SamplingParams, dtype: str, start: int, count: int
) -> None:
    """Results of the others are the same to the bit as with a good row in its place."""

    def run(bad: bool) -> tuple[list[SampledToken], list[SampledToken]]:
        runner = make_runner(folder, dtype=dtype)
        first, second, decoding, last = prompts([33, 50, 20, 40])
        runner.execute([decoding.row(0, 20, sample=params), second.row(0, 30), last.row(0, 7)])
        last.tokens[7] = BAD if bad else BAD + 1
        rows = [first.row(0, 33, sample=params), second.row(30, 10), decoding.row(20, 1, tokens=b"", sample=params)]
        fields = {"sample": params} if start + count == 40 else {}
        found = runner.execute([*rows, last.row(start, count, **fields)])
        assert found.nonfinite == ([last.request] if bad else [])
        after = runner.execute([second.row(40, 10, sample=params), decoding.row(21, 1, tokens=b"", sample=params)])
        assert after.nonfinite == []
        return [sample for sample in found.samples if sample.request != last.request], after.samples

    assert run(True) == run(False)


def test_a_row_that_was_planned_before_its_request_failed(folder: Path) -> None:
    """It runs with a placeholder token, and comes out NaN as well."""
    runner = make_runner(folder)
    good, bad = prompts([20, 20])
    bad.tokens[3] = BAD
    greedy = SamplingParams(temperature=0.0)
    assert runner.execute([good.row(0, 20, sample=greedy), bad.row(0, 20, sample=greedy)]).nonfinite == [bad.request]
    found = runner.execute([one.row(20, 1, tokens=b"", sample=greedy) for one in (good, bad)])
    assert ([sample.request for sample in found.samples], found.nonfinite) == ([good.request], [bad.request])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("plane", [0, 1], ids=["keys", "values"])
def test_one_nan_in_a_page(saved: Models, layer: int, plane: int, dtype: str) -> None:
    """One number of one layer, far from the last token, as it may come from a prefill server."""
    runner = make_runner(saved("llama").folder, dtype=dtype)
    good, bad = prompts([40, 40])
    greedy = SamplingParams(temperature=0.0)
    for prompt in (good, bad):
        assert runner.execute([prompt.row(0, 39)]).nonfinite == []
    runner.pool.tensor[bad.pages[1], layer, plane, 1, 3, 5] = torch.nan
    for rows in (
        [bad.row(39, 1, sample=greedy), good.row(39, 1, sample=greedy)],
        [good.row(39, 1, sample=greedy), bad.row(39, 1)],
        [bad.row(30, 10, sample=greedy)],
        [bad.row(30, 10, sample=None)],
    ):
        assert runner.execute(rows).nonfinite == [bad.request]


def test_nan_left_in_pages_does_not_affect_their_next_request(saved: Models) -> None:
    runner, fresh = (make_runner(saved("llama").folder) for _ in range(2))
    (prompt,) = prompts([21])
    runner.pool.tensor[prompt.pages] = torch.nan
    fresh.pool.tensor.zero_()
    rows = [prompt.row(0, 9), prompt.row(9, 12)]
    results = [[made.execute([row]) for row in rows] for made in (runner, fresh)]
    assert results[0] == results[1]
    assert [found.nonfinite for found in results[0]] == [[], []]


def stages(folder: Path) -> list[ModelRunner]:
    return [make_runner(folder, layers=layers) for layers in (range(2), range(2, 3))]


def test_the_last_stage_reports_nan_of_the_first(saved: Models) -> None:
    first, last = stages(saved("llama").folder)
    good, bad = prompts([40, 40])

    def compute(rows: list[PlanRow]) -> list[int]:
        return last.sample(rows, last.forward(rows, first.forward(rows))).result().nonfinite

    assert compute([good.row(0, 39), bad.row(0, 39)]) == []
    first.pool.tensor[bad.pages[0], 1, 0, 0, 0, 0] = torch.nan
    assert compute([good.row(39, 1), bad.row(39, 1)]) == [bad.request]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_the_head_fails_the_sampled_requests(tmp_path: Path, value: float) -> None:
    saved = save_model(CONFIGS["mistral"], tmp_path)
    with torch.no_grad():
        saved.model.get_output_embeddings().weight[7] = value
    saved.model.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    one, other = prompts([20, 30])
    found = runner.execute([one.row(0, 20, sample=PARAMS[2]), other.row(0, 10)])
    assert (found.samples, found.nonfinite) == ([], [one.request])
