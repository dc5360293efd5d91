"""The bundled GGUF model against transformers' own reading of it, and against its export."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import headrace.engine.runner
from headrace.core.types.request import SamplingParams
from headrace.engine.attention.cuda import VarlenAttention
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.compiled import CompiledArithmetic
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.runner import ModelRunner
from tests.engine.flash import flash_on_cpu
from tests.engine.models import (
    Prompt,
    make_runner,
    pool_tokens,
    reference,
    reported_logprobs,
    run_chunks,
    smollm2,
    transformers_tokenizer,
)

TEXT = (
    "The water of the headrace turns the wheel, and the wheel turns the stone. The miller, who sleeps above, wakes "
    "when the stone stops, so he has a bell that rings when the hopper is empty. In 1969 three men flew to the moon; "
    "two of them walked on it, while the third waited in orbit."
)
PROMPTS = ((0, 12, 64), (0, 61, 33), (5, 50, 64), (40, 76, 64), (45, 60, 64), (50, 72, 64))  # first, end, and chunk
LUCK = 1.05  # both round in the same places where both compute in bfloat16: who comes nearer is chance
LOGPROBS = SamplingParams(temperature=0.0, logprobs=20)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return smollm2()


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("smollm2")


def test_logits_and_pages_equal_transformers(oracle: PreTrainedModel, runner: ModelRunner) -> None:
    tokenizer = transformers_tokenizer("smollm2")
    tokens = tokenizer(TEXT)["input_ids"]
    prompt = Prompt(1, tokens, list(range(20, 0, -1)), 16)
    logprobs, keys_values = reference(oracle, tokens)
    samples = [runner.execute([row])[0] for row in prompt.chunks(48)]
    chosen = samples[-1][0].logprob
    sampled = runner.execute([prompt.row(len(tokens) - 1, 1, sample=LOGPROBS)])[0][0]
    assert chosen is not None
    assert sampled.token == chosen.token == int(logprobs[-1].argmax())
    assert sampled.logprob is not None
    expected = logprobs[-1][list(sampled.logprob.top_ids)]
    torch.testing.assert_close(torch.tensor(sampled.logprob.top_logprobs), expected, atol=1e-3, rtol=1e-3)
    written = pool_tokens(runner, prompt.pages, len(tokens))
    torch.testing.assert_close(written, keys_values, atol=2e-3, rtol=2e-3)


def as_found(patch: pytest.MonkeyPatch) -> None:
    """Computed in float32, unless this CPU multiplies bfloat16."""


def cpu_with_units(patch: pytest.MonkeyPatch) -> None:
    """Computed in bfloat16, which torch does here one way or another."""
    patch.setattr(headrace.engine.runner, "has_matrix_units", lambda dtype, device: True)


def gpu(patch: pytest.MonkeyPatch) -> None:
    """What a GPU is given to do, down to its flash kernel."""
    cpu_with_units(patch)
    patch.setattr(headrace.engine.runner, "choose_attention", lambda pool, **others: VarlenAttention(pool))
    patch.setattr(headrace.engine.runner, "choose_arithmetic", lambda *others: CompiledArithmetic("aot_eager"))


class SixteenBits(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor  # of transformers in float32: those after each of the prompts
    error: torch.Tensor  # of transformers in bfloat16


@pytest.fixture(scope="module")
def sixteen_bits(oracle: PreTrainedModel) -> SixteenBits:
    tokens = transformers_tokenizer("smollm2")(TEXT)["input_ids"]

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.inference_mode():
            inputs = [torch.tensor([tokens[first:end]]) for first, end, _ in PROMPTS]
            return torch.cat([centred(model(ids, logits_to_keep=1).logits[0, -1]) for ids in inputs])

    expected = logits(oracle)
    return SixteenBits(tokens, expected, relative(logits(copy.deepcopy(oracle).to(torch.bfloat16)), expected))


@pytest.mark.parametrize("machine", [as_found, cpu_with_units, gpu])
def test_bfloat16_is_as_accurate_as_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, sixteen_bits: SixteenBits, machine: Callable[..., None]
) -> None:
    """By the relative norm of the distance from float32 logits, for several prompts in one chunk and in two."""
    machine(monkeypatch)
    runner = make_runner("smollm2", dtype="bfloat16")
    everything = SamplingParams(temperature=0.0, logprobs=runner.vocab_size)
    found = []
    for first, end, chunk in PROMPTS:
        prompt = Prompt(1, sixteen_bits.tokens[first:end], list(range(20, 0, -1)), 16)
        rows = [row if row.sample is None else msgspec.structs.replace(row, sample=everything)
                for row in prompt.chunks(chunk)]  # fmt: skip
        with flash_on_cpu():
            found.append(centred(reported_logprobs(run_chunks(runner, rows))))
    assert 0 < relative(torch.cat(found), sixteen_bits.logits) <= LUCK * sixteen_bits.error


def relative(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (logits - expected).norm() / expected.norm()


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Without what is common to all, which no probability shows."""
    return logits.float() - logits.float().mean()


def test_an_export_has_the_same_fingerprint(oracle: PreTrainedModel, runner: ModelRunner, tmp_path: Path) -> None:
    export = AutoModelForCausalLM.from_config(copy.deepcopy(oracle.config))  # that one is marked as read from GGUF
    export.load_state_dict(oracle.state_dict())
    export.save_pretrained(tmp_path)
    source = resolve_source(str(tmp_path))
    spec = load_spec(source)
    assert fingerprint(spec, open_checkpoint(source, spec)) == runner.fingerprint
