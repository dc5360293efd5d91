"""Attention by FlashInfer on a GPU: what its passes launch and wait for, and plans that are in flight together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import DEEPSEEK_V3, LLAMA_8B
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine import device
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.pool import KVPool
from headrace.engine.load_plan import model_terms
from tests.engine.attention import fake_flashinfer
from tests.engine.attention.passes import attend
from tests.engine.cuda.clocks import HOST
from tests.engine.cuda.fake_gpu import Event, FakeGpu
from tests.engine.cuda.models import fake_runner, incoming, pass_cost, row
from tests.engine.cuda.test_passes import BATCHES, BUDGETS

LAYERS = 2


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[None]:
    with fake_flashinfer.installed():
        yield


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama-3.3-70b-tp4", "qwen3-30b-a3b"))],
)
def test_keys_and_values_are_read_where_they_are(gpu: FakeGpu, tmp_path: Path, name: str, batch: str) -> None:
    """A launch of each layer less than with torch's kernel, the gather, and its bytes."""
    budget = BUDGETS[name][batch]
    cost = pass_cost(gpu, tmp_path, name, BATCHES[batch])
    assert cost.layer_launches == budget["layer"] - 1, cost.counts.described()
    assert cost.pass_launches == budget["rest"] + 1, cost.counts.described()
    assert round(cost.layer_bytes / 1e6) < budget["megabytes"]
    assert not cost.counts.syncs, cost.counts.described()
    assert cost.counts.operations()["[paged_attention]"] == 1
    assert cost.counts.operations()["index_select"] == 0
    assert not any("pageable" in way for way in cost.counts.copied)


@pytest.mark.parametrize("batch", ["mixed", "decode"])
def test_latents_are_read_where_they_are(gpu: FakeGpu, tmp_path: Path, batch: str) -> None:
    """Of all rows in absorbed form at once: a launch for them, none for each."""
    cost = pass_cost(gpu, tmp_path, "deepseek-v3-tp8", BATCHES[batch])
    assert not cost.counts.syncs, cost.counts.described()
    assert cost.counts.operations()["[paged_attention]"] == 1
    expanded = {"mixed": 2, "decode": 0}[batch]
    assert cost.counts.operations()["_varlen_attn"] == expanded
    assert [each.backend for each in fake_flashinfer.made] == ["fa3"] * 2, "a model of one layer, and one of two"
    assert not any("pageable" in way for way in cost.counts.copied)
    budget = BUDGETS["deepseek-v3-tp8"][batch]
    assert (cost.layer_launches, cost.pass_launches) < (budget["layer"], budget["rest"])


@pytest.mark.parametrize(
    ("shape", "chosen", "terms", "why"),
    [
        (DEEPSEEK_V3, "cuda:0", {"attention": "triton"}, "this model attends to latents"),
        (DEEPSEEK_V3, "cuda:0", {"mla": "expanded"}, "--mla expanded does not read the latents where they are"),
        (LLAMA_8B, "cpu", {}, "it is for GPUs, and --device is cpu"),
        (LLAMA_8B, "cpu", {"attention": "triton"}, "it is for GPUs, and --device is cpu"),
    ],
)
def test_what_it_cannot_compute_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], chosen: str, terms: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(device, "_gpus", lambda: 8)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = ModelConfig(model=str(tmp_path), dtype="bfloat16", device=chosen)
    terms = {"attention": "flashinfer", **terms}
    with pytest.raises(ConfigError, match=rf"^--attention {terms['attention']}: {why}; leave it out$"):
        model_terms(model, EngineConfig(**terms))
    model_terms(model, EngineConfig())


def test_halves_wait_for_nothing(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = [row(1, 0, 600), row(2, 32, 400, first_page=100)]
    with fake_runner(gpu, tmp_path, "qwen3-30b-a3b", halves=True) as made:
        hidden = incoming(made, rows)
        with gpu.counted() as counts:
            for _ in range(3):
                made.forward(rows, hidden, Agreement((1000,), cut=500))
    assert not counts.syncs, counts.described()
    assert len(fake_flashinfer.made) == 2, "a plan for each half, again and again"


def queue_passes(gpu: FakeGpu) -> None:
    """Two passes, the second planned before the first has begun on the device."""
    with gpu:
        from headrace.engine.attention.flashinfer import FlashInfer

        pool = KVPool(Geometry("bfloat16", LAYERS, 2, 64, 16), 8, "cuda:0")
        gpu.divide(pool.tensor, pool.geometry.page_bytes)
        begin = FlashInfer(pool, 4)
        for page in (0, 3):
            running = begin([AttentionSpan(0, 12, np.array([page]))])
            for layer in range(LAYERS):
                query, keys_values = (torch.empty(12, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                attend(running, layer, query, keys_values)


@pytest.mark.parametrize(("done", "wrappers"), [(True, 1), (False, 2)])
def test_plans_that_are_not_copied_are_not_written_over(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, done: bool, wrappers: int
) -> None:
    if not done:
        monkeypatch.setattr(Event, "query", lambda _: False)
    queue_passes(gpu)
    assert len(fake_flashinfer.made) == wrappers


def test_one_wrapper_for_all_would_be_a_race(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double shows what the real one would do."""
    gpu = FakeGpu(guard)

    def unasked(_: Any) -> bool:
        return True

    monkeypatch.setattr(Event, "query", unasked)  # it says so without having waited
    queue_passes(gpu)
    assert [race.what for race in gpu.races] == ["write after read"]
    assert gpu.races[0].second.agent == HOST
