"""DeepSeek models with multi-head latent attention: what transformers computes, in either form of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace.engine.runner
from headrace.engine.model.weights import LayerReader
from tests.cpus import KINDS, cpuinfo
from tests.engine.gold import Gold
from tests.engine.models import (
    LATENTS,
    Prompt,
    Saved,
    make_runner,
    pool_tokens,
    random_tokens,
    reference,
    run_chunks,
    shuffled_pages,
)

Models = Callable[[str], Saved]
GOLD = Gold(3e-4)
FORMS = ("absorbed", "expanded", "length")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LATENTS)
def test_lengths_around_the_edges(saved: Models, name: str, form: str, kind: str) -> None:
    """Of pages and chunks; single tokens behind a prefix and chunks of several query tiles among them."""
    for page_size, chunks in ((16, (7, 16, 256)), (64, (64, 200))):
        runner = make_runner(saved(name).folder, page_size=page_size, cpuinfo=cpuinfo(kind), mla=form)
        for chunk in chunks:
            for length in (1, 2, 15, 16, 17, 63, 64, 65, 129):
                GOLD.check(runner, saved(name), length, chunk)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LATENTS)
def test_without_native_kernels(saved: Models, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.engine.runner, "load_kernels", lambda **_: None)
    runner = make_runner(saved(name).folder, mla=form)
    for length, chunk in ((41, 25), (65, 64), (300, 290)):
        check_long = make_runner(saved(name).folder, mla=form, max_model_len=512) if length > 256 else runner
        GOLD.check(check_long, saved(name), length, chunk)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LATENTS)
def test_as_on_a_gpu(saved: Models, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched products over heads and attention by torch, in float32."""
    monkeypatch.setattr(headrace.engine.runner, "load_kernels", lambda **_: None)
    monkeypatch.setattr(LayerReader, "on_cpu", False)
    runner = make_runner(saved(name).folder, mla=form)
    for length, chunk in ((41, 25), (65, 64)):
        GOLD.check(runner, saved(name), length, chunk)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_both_forms_in_one_plan(saved: Models, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decoding rows of several prompts; by length some are expanded and others are not."""
    found: list[int] = []
    call = headrace.engine.attention.latent.LatentAttention.__call__

    def counted(self: Any, spans: Any) -> Any:
        made = call(self, spans)
        found.append(len(made.parts))
        return made

    monkeypatch.setattr(headrace.engine.attention.latent.LatentAttention, "__call__", counted)
    model = saved("deepseek-v3")
    runner = make_runner(model.folder, mla=form)
    GOLD.check_mixed(runner, model)
    assert max(found) == (2 if form == "length" else 1)


@pytest.mark.parametrize("name", LATENTS)
def test_greedy_text_is_that_of_transformers(saved: Models, name: str) -> None:
    model = saved(name)
    runner = make_runner(model.folder)
    prompt = Prompt(1, random_tokens(45, seed=4), shuffled_pages(8, 64), 16)
    asked = prompt.row(0, 45).sample
    tokens = [run_chunks(runner, prompt.chunks(32)).token]
    for step in range(19):
        [sample] = runner.execute([prompt.row(45 + step, 1, tokens=b"", sample=asked)])[0]
        tokens.append(sample.token)
    expected = model.model.generate(
        torch.tensor([prompt.tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == expected[0, 45:].tolist()


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_bfloat16_stays_close(saved: Models, form: str, kind: str, quantize: str) -> None:
    """16-bit weights and latents: near the float32 model; linear layers in 8 bits a little further off."""
    model = saved("deepseek-v3")
    runner = make_runner(model.folder, dtype="bfloat16", cpuinfo=cpuinfo(kind), mla=form, quantize=quantize)
    prompt = Prompt(1, random_tokens(70), shuffled_pages(8, 64), 16)
    run_chunks(runner, prompt.chunks(32))
    _, latents = reference(model.model, prompt.tokens)
    written = pool_tokens(runner, prompt.pages, 70).float()
    assert runner.geometry.tensors[0].slot_bytes == 2 * 48
    assert (written - latents).abs().mean() / latents.abs().mean() < (0.03 if quantize == "none" else 0.06)


def test_stages_in_a_row_equal_one(saved: Models) -> None:
    model = saved("deepseek-v2")
    runners = [make_runner(model.folder, layers=layers) for layers in (range(1), range(1, 3))]
    whole = make_runner(model.folder)
    assert [runner.geometry.tensors[0].layer_start for runner in runners] == [0, 1]
    GOLD.check_stages(*runners, whole)


def test_fingerprints_tell_models_apart(saved: Models) -> None:
    assert len({make_runner(saved(name).folder).fingerprint for name in LATENTS}) == len(LATENTS)
