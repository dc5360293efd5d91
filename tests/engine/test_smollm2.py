"""The bundled GGUF model against transformers' own reading of it, and against its export."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.request import SamplingParams
from engine.model.checkpoint import open_checkpoint
from engine.model.fingerprint import fingerprint
from engine.model.source import load_spec, resolve_source
from engine.runner import ModelRunner
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

TEXT = "The water of the headrace turns the wheel, and the wheel turns the stone. " * 4
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


def test_bfloat16_is_as_accurate_as_that_of_transformers(oracle: PreTrainedModel) -> None:
    """By the relative norm of the distance from float32 logits, for several prompts in one chunk and in two."""
    tokens = transformers_tokenizer("smollm2")(TEXT)["input_ids"]
    low = copy.deepcopy(oracle).to(torch.bfloat16)
    runner = make_runner("smollm2", dtype="bfloat16")
    everything = SamplingParams(temperature=0.0, logprobs=runner.vocab_size)
    found, theirs, expected = [], [], []
    for count, chunk in ((12, 64), (40, 64), (61, 33)):
        prompt = Prompt(1, tokens[:count], list(range(20, 0, -1)), 16)
        rows = [row if row.sample is None else msgspec.structs.replace(row, sample=everything)
                for row in prompt.chunks(chunk)]  # fmt: skip
        found.append(centred(reported_logprobs(run_chunks(runner, rows))))
        with torch.inference_mode():
            theirs.append(centred(low(torch.tensor([prompt.tokens])).logits[0, -1].float()))
            expected.append(centred(oracle(torch.tensor([prompt.tokens])).logits[0, -1]))
    reference = torch.cat(expected)
    error, their_error = ((torch.cat(logits) - reference).norm() / reference.norm() for logits in (found, theirs))
    assert 0 < error <= their_error


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Without what is common to all, which no probability shows."""
    return logits - logits.mean()


def test_an_export_has_the_same_fingerprint(oracle: PreTrainedModel, runner: ModelRunner, tmp_path: Path) -> None:
    export = AutoModelForCausalLM.from_config(copy.deepcopy(oracle.config))  # that one is marked as read from GGUF
    export.load_state_dict(oracle.state_dict())
    export.save_pretrained(tmp_path)
    source = resolve_source(str(tmp_path))
    spec = load_spec(source)
    assert fingerprint(spec, open_checkpoint(source, spec)) == runner.fingerprint
