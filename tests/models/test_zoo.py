"""Every architecture of the zoo as transformers computes it: chunks beside another request, then single tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.library.decoder import LibraryDecoder
from headrace.engine.runner import ModelRunner
from tests.engine.models import VOCABULARY, Prompt, make_runner, random_tokens, reported_logprobs
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import Kept, Reference, keeper, make_model, passed, reference, repeated

LENGTH, STEPS, CHUNK, PAGE = 70, 5, 33, 16
CLOSE = 2e-3
QUICK = ("smollm3", "gpt-oss", "gemma3", "qwen3-vl", "gemma4", "mimo-v2-flash", "granite", "deepseek-v3")
SERVED = [name for name, each in ARCHITECTURES.items() if not each.refused]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    return keeper(tmp_path_factory, random_tokens(LENGTH), STEPS + 1)


def some(names: list[str]) -> list[Any]:
    """The quick ones, and the others in make full."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def computed(runners: list[ModelRunner], expected: Reference) -> Tensor:
    """Log-probabilities after the prompt and after each token of the reference, by a pipeline of runners. A second
    request is computed in the same passes."""
    tokens = [*random_tokens(LENGTH), *expected.tokens[:-1]]
    own = Prompt(1, tokens, [3, 1, 9, 5, 12, 7], PAGE)
    other = Prompt(2, random_tokens(90, seed=9), [2, 4, 6, 8, 10, 11], PAGE)
    steps = [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, LENGTH - 2 * CHUNK), *((LENGTH + at, 1) for at in range(STEPS))]
    batches = []
    for index, (start, count) in enumerate(steps):
        rows = [other.row(index * 11, 11), own.row(start, count)] if index < 8 else [own.row(start, count)]
        if start + count >= LENGTH:
            greedy = Prompt(1, tokens[: start + count], own.pages, PAGE)
            rows[-1] = greedy.row(start, count)
        batches.append(rows)
    return passed(runners, batches)


@pytest.mark.parametrize("name", some(SERVED))
def test_logprobs_are_those_of_transformers(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    found = computed([make_runner(model.folder, decoder="library")], model.expected)
    assert found.shape == (STEPS + 1, VOCABULARY)
    torch.testing.assert_close(found, model.expected.logprobs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", some([name for name in SERVED if ARCHITECTURES[name].stages]))
def test_two_stages_equal_transformers(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    whole = make_runner(model.folder, decoder="library")
    layers = whole._part.spec.layers
    runners = [
        make_runner(model.folder, decoder="library", layers=part)
        for part in (range(layers // 2), range(layers // 2, layers))
    ]
    assert runners[0].fingerprint == runners[1].fingerprint == whole.fingerprint
    torch.testing.assert_close(computed(runners, model.expected), model.expected.logprobs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", some(["gpt-oss", "gemma3", "mimo-v2-flash", "granite", "qwen3-moe", "glm4.5", "llama4",
                                       "gemma4", "phi4-mini", "command-r"]))  # fmt: skip
def test_neither_chunks_nor_neighbours_change_a_bit(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    runner = make_runner(model.folder, decoder="library")
    assert runner.same_bits
    alone = []
    for end in range(LENGTH, LENGTH + STEPS + 1):
        prompt = Prompt(3, [*random_tokens(LENGTH), *model.expected.tokens[: end - LENGTH]], [3, 1, 9, 5, 12, 7], PAGE)
        alone.append(reported_logprobs(runner.execute([prompt.row(0, end)]).samples[0]))
    assert torch.equal(computed([runner], model.expected), torch.stack(alone))


@pytest.mark.parametrize("name", some([name for name, each in ARCHITECTURES.items() if each.refused]))
def test_what_is_not_served_is_refused_with_the_reason(kept: Callable[[str], Kept], name: str) -> None:
    with pytest.raises(ConfigError, match=ARCHITECTURES[name].refused):
        make_runner(kept(name).folder)


def test_rotations_by_length_are_part_of_the_fingerprint(kept: Callable[[str], Kept]) -> None:
    """A pair of servers with other --max-model-len would have other keys."""
    model = kept("phi4-mini")
    short, long = (make_runner(model.folder, max_model_len=length) for length in (128, 256))
    assert short.fingerprint != long.fingerprint
    plain = kept("phi3")
    short, long = (make_runner(plain.folder, max_model_len=length) for length in (128, 256))
    assert short.fingerprint == long.fingerprint


ROUNDED = ("granite", "gemma3", "olmo2", "exaone4", "qwen3.5", "kimi-linear", "falcon-h1", "lfm2", "cohere2", "gpt2")


@pytest.mark.parametrize("name", some(list(ROUNDED)))
def test_bfloat16_is_within_its_rounding(name: str, tmp_path: Path) -> None:
    """Weights, KV and, where the CPU has units for it, computation in bfloat16: no further from float32 than
    transformers in bfloat16; models without routers, or with such as rounding does not move. A state is rounded once
    more where a prompt is cut."""
    model = make_model(ARCHITECTURES[name]).bfloat16()
    model.save_pretrained(tmp_path)
    prompt = random_tokens(LENGTH)
    expected = reference(model.float(), prompt, STEPS + 1)
    runner = make_runner(tmp_path, decoder="library", dtype="bfloat16")
    found = computed([runner], expected)
    if runner.hidden_spec.dtype == torch.float32:
        torch.testing.assert_close(found, expected.logprobs, atol=0.1, rtol=0)
    rounded = repeated(model.bfloat16(), prompt, expected.tokens)
    ours, theirs = (float((each - expected.logprobs).square().mean().sqrt()) for each in (found, rounded))
    assert 0 < ours < 2 * theirs


@pytest.mark.parametrize("name", ["phi4-mini", pytest.param("jamba", marks=pytest.mark.full)])
def test_a_trial_finds_what_is_computed_wrong(
    kept: Callable[[str], Kept], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations by the longest position of a batch, where they are not fixed; a scan that cannot begin with a state,
    where its tokens still come together."""
    if name == "jamba":
        monkeypatch.setattr(LibraryDecoder, "one_by_one", property(lambda _: False, lambda *_: None), raising=False)
    else:
        monkeypatch.setattr("headrace.engine.library.decoder.length_ropes", lambda _: ())
    with pytest.raises(ConfigError, match="would be computed wrong"):
        make_runner(kept(name).folder, decoder="library")
