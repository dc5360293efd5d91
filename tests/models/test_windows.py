"""Models with windows whose keys and values are kept in rings (--windows free), beside transformers."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.runner import ModelRunner
from tests.engine.models import Prompt, make_runner, random_tokens, shuffled_pages
from tests.models.architectures import ARCHITECTURES, WINDOW
from tests.models.zoo import Kept, Reference, keeper, make_model, passed

LENGTH, STEPS, PAGE = 330, 4, 16  # a ring has 128 places
OWN, OTHER = shuffled_pages(44, 64)[:22], shuffled_pages(44, 64)[22:]
CHUNKS = (0, 150, 151, 290, LENGTH)
FREED = {  # layers with rings, by model
    "gemma2": 2, "gemma3": 3, "gpt-oss": 2, "cohere2": 3, "exaone4": 3, "olmo3": 3, "mimo-v2-flash": 3, "gemma4": 3,
}  # fmt: skip
QUICK = ("gemma3", "gpt-oss")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    return keeper(tmp_path_factory, random_tokens(LENGTH), STEPS + 1)


def some() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FREED]


def runner_of(kept: Kept, **fields: Any) -> ModelRunner:
    return make_runner(kept.folder, decoder="library", max_model_len=512, windows="free", **fields)


def computed(runners: list[ModelRunner], expected: Reference, cuts: tuple[int, ...]) -> Tensor:
    """Log-probabilities after the prompt and after each token of the reference; a second request beside chunks."""
    tokens = [*random_tokens(LENGTH), *expected.tokens[:-1]]
    other = Prompt(2, random_tokens(350, seed=9), OTHER, PAGE)
    steps = [*pairwise(cuts), *((LENGTH + at, LENGTH + at + 1) for at in range(STEPS))]
    batches = []
    for index, (start, end) in enumerate(steps):
        own = Prompt(1, tokens[:end] if end >= LENGTH else tokens, OWN, PAGE).row(start, end - start)
        batches.append([other.row(index * 70, 70), own] if len(cuts) > 2 and index < 4 else [own])
    return passed(runners, batches)


@pytest.mark.parametrize("name", some())
def test_logprobs_are_those_of_transformers(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    runner = runner_of(model)
    rings = [part for part in runner.pool.geometry.components if part.window]
    assert {part.window for part in rings} == {WINDOW}
    assert sum(part.layers * part.planes for part in rings) == 2 * FREED[name]
    whole, chunks = (computed([runner], model.expected, cuts) for cuts in ((0, LENGTH), CHUNKS))
    torch.testing.assert_close(chunks, model.expected.logprobs, atol=2e-3, rtol=2e-3)
    if runner.same_bits:
        assert torch.equal(whole, chunks)


@pytest.mark.parametrize("name", some())
def test_two_stages_equal_transformers(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    if not ARCHITECTURES[name].stages:
        pytest.skip("has no stages")
    layers = runner_of(model)._part.spec.layers
    parts = range(layers // 2), range(layers // 2, layers)
    found = computed([runner_of(model, layers=part) for part in parts], model.expected, CHUNKS)
    torch.testing.assert_close(found, model.expected.logprobs, atol=2e-3, rtol=2e-3)


def test_a_pool_is_smaller_by_what_is_freed(kept: Callable[[str], Kept]) -> None:
    """Three of four layers have a window; the fingerprint of a model does not say how its cache is kept."""
    model = kept("gemma3")
    freed, whole = runner_of(model), make_runner(model.folder, decoder="library", max_model_len=512)
    assert 4 * freed.pool.geometry.page_bytes == whole.pool.geometry.page_bytes
    assert freed.pool.geometry.states_sent(LENGTH) == 3 * WINDOW * (whole.pool.geometry.page_bytes // PAGE // 4)
    assert whole.pool.geometry.state_bytes == 0


def test_a_window_that_is_most_of_the_longest_sequence_has_no_ring(tmp_path: Path) -> None:
    make_model(ARCHITECTURES["gemma3"], max_position_embeddings=200).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no layer of this model .* has a window that can be freed"):
        make_runner(tmp_path, decoder="library", max_model_len=200, windows="free")
