"""Logits and KV pages equal those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cpus import KINDS, cpuinfo
from tests.engine.gold import Gold
from tests.engine.models import (
    CONFIGS,
    VOCABULARY,
    Prompt,
    Saved,
    make_runner,
    pool_tokens,
    random_tokens,
    reference,
    reported_logprobs,
    run_chunks,
    save_model,
    shuffled_pages,
)

pytestmark = pytest.mark.cpu_kind

Models = Callable[[str], Saved]
GOLD = Gold(2e-4)


def check(saved: Saved, length: int, chunk: int, page_size: int, kind: str = "") -> None:
    """kind: of CPU, by default that of the test run."""
    runner = make_runner(saved.folder, page_size=page_size, cpuinfo=kind and cpuinfo(kind))
    GOLD.check(runner, saved, length, chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_in_two_chunks(saved: Models, name: str, kind: str) -> None:
    check(saved(name), length=41, chunk=25, page_size=16, kind=kind)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("chunk", [7, 16, 64, 256])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_lengths_around_the_edges(saved: Models, length: int, chunk: int, page_size: int) -> None:
    check(saved("llama"), length, chunk, page_size)


@pytest.mark.parametrize("chunk", [129, 200])
def test_chunks_of_several_query_tiles(saved: Models, chunk: int) -> None:
    check(saved("qwen2-yarn"), length=256, chunk=chunk, page_size=16)


def test_sharded_safetensors(tmp_path: Path) -> None:
    saved = save_model(CONFIGS["qwen2"], tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(saved, length=20, chunk=20, page_size=16)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mixed_batches_equal_separate_runs(saved: Models, name: str) -> None:
    model = saved(name)
    GOLD.check_mixed(make_runner(model.folder), model)


def test_decoding_feeds_on_its_own_samples(saved: Models) -> None:
    model = saved("llama")
    runner = make_runner(model.folder)
    prompts = [Prompt(index, random_tokens(length, index), [index * 8 + page for page in range(8)], 16)
               for index, length in enumerate((3, 40, 16))]  # fmt: skip
    texts = {}
    for prompt in prompts:
        texts[prompt.request] = [*prompt.tokens, run_chunks(runner, prompt.chunks(64)).token]
    for step in range(20):
        rows = [
            prompt.row(len(prompt.tokens) + step, 1, tokens=b"", sample=prompt.row(0, len(prompt.tokens)).sample)
            for prompt in prompts
        ]
        for sample in runner.execute(rows)[0]:
            texts[sample.request].append(sample.token)
    for prompt in prompts:
        expected = list(prompt.tokens)
        for _ in range(21):
            expected.append(int(reference(model.model, expected)[0][-1].argmax()))
        assert texts[prompt.request] == expected


def test_released_requests_have_no_last_token(saved: Models) -> None:
    runner = make_runner(saved("llama").folder)
    prompt = Prompt(5, random_tokens(4), [1], 16)
    run_chunks(runner, prompt.chunks(4))
    runner.release(5)
    with pytest.raises(ValueError, match="request 5 has no tokens"):
        runner.execute([prompt.row(4, 1, tokens=b"")])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_stages_in_a_row_equal_one(saved: Models, name: str) -> None:
    model = saved(name)
    first = make_runner(model.folder, layers=range(1))
    last = make_runner(model.folder, layers=range(1, 3))
    whole = make_runner(model.folder)
    assert first.geometry.layer_start == 0
    assert last.geometry.layer_start == 1
    GOLD.check_stages(first, last, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 70])
def test_bfloat16_stays_close(saved: Models, length: int, kind: str) -> None:
    """16-bit weights and KV: near the float32 model, and the pool holds two bytes per element."""
    model = saved("llama")
    runner = make_runner(model.folder, dtype="bfloat16", cpuinfo=cpuinfo(kind))
    prompt = Prompt(1, random_tokens(length), shuffled_pages(8, 64), 16)
    sampled = run_chunks(runner, prompt.chunks(32))
    _, keys_values = reference(model.model, prompt.tokens)
    written = pool_tokens(runner, prompt.pages, length).float()
    assert runner.geometry.item_bytes == 2
    assert 0 <= sampled.token < VOCABULARY
    error = (written - keys_values).abs().mean() / keys_values.abs().mean()
    assert error < 0.03


def test_weights_are_the_same_however_they_are_held(saved: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, or converted by every pass: on a CPU without 16-bit matrix units both compute in float32."""
    plain = cpuinfo("avx2")
    model = saved("llama-bias")
    wide = make_runner(model.folder, dtype="bfloat16", cpuinfo=plain)
    monkeypatch.setattr("headrace.engine.kv.memory_plan.WIDE_SHARE", 0.0)
    narrow = make_runner(model.folder, dtype="bfloat16", cpuinfo=plain)
    rows = Prompt(1, random_tokens(70), shuffled_pages(8, 64), 16).chunks(32)
    one, other = (reported_logprobs(run_chunks(each, rows)) for each in (wide, narrow))
    torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_warm_up_leaves_no_trace(saved: Models) -> None:
    """Warm-up over a pool of NaN works, and what it wrote does not show later."""
    model = saved("llama")
    runner = make_runner(model.folder)
    runner.warm_up()
    prompt = Prompt(1, random_tokens(20), [0, 1], 16)
    logprobs, _ = reference(model.model, prompt.tokens)
    sampled = run_chunks(runner, prompt.chunks(64))
    GOLD.close(reported_logprobs(sampled), logprobs[-1])


def test_bad_rows_are_refused(saved: Models) -> None:
    runner = make_runner(saved("llama").folder)
    prompt = Prompt(1, random_tokens(20), [0, 64], 16)
    with pytest.raises(IndexError, match="outside the pool of 64"):
        runner.execute([prompt.row(0, 20)])
    with pytest.raises(ValueError, match="1 pages for 20 positions"):
        runner.execute([Prompt(1, random_tokens(20), [0], 16).row(0, 20)])
    with pytest.raises(ValueError, match="has 3 tokens for 20 positions"):
        runner.execute([Prompt(1, random_tokens(20), [0, 1], 16).row(0, 20, tokens=bytes(12))])
