"""Shards of transformers' modules (--tp), as threads of one process: log-probabilities of transformers, KV in parts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.operations import Collectives
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.library.model import ModelPart, model_class, on_meta, read_config, stage_class
from headrace.engine.library.spec import library_spec
from headrace.engine.model.sharding import part_of, split_model
from headrace.engine.model.source import resolve_source
from headrace.engine.runner import ModelRunner
from tests.engine.collectives.threads import run_ranks
from tests.engine.library_shards import load_one_at_a_time
from tests.engine.models import make_runner, random_tokens
from tests.models.architectures import ARCHITECTURES
from tests.models.test_zoo import CLOSE, LENGTH, SERVED, STEPS, computed
from tests.models.zoo import Kept, keeper

QUICK = ("gpt-oss", "qwen3.5-moe", "gemma4")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    return keeper(tmp_path_factory, random_tokens(LENGTH), STEPS + 1)


@pytest.fixture(autouse=True)
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    load_one_at_a_time(monkeypatch)


def whole(folder: Path, **fields: Any) -> ModelRunner:
    return make_runner(folder, decoder="library", **fields)


def sharded(kept: Kept, shards: int, **fields: Any) -> list[tuple[ModelRunner, Tensor]]:
    """Runners of all shards, and the log-probabilities that the first one reports."""

    def work(tp: Collectives) -> tuple[ModelRunner, Tensor]:
        runner = whole(kept.folder, tp=tp, **fields)
        return runner, computed([runner], kept.expected)

    return run_ranks(shards, work, deadline_s=120)


def check_parts(one: ModelRunner, shards: Sequence[ModelRunner]) -> None:
    """Every shard has its heads of what one runner has computed, or the same states and latents.

    A layer with an index attends to its best positions, among which rounding decides where scores are equal.
    """
    library = one._part.spec.library
    assert library is not None
    flipped = 0.02 if any("index" in tensor.name for tensor in one.pool.geometry.tensors) else 0.0
    for tensor in one.pool.geometry.tensors:
        held = one.pool.tensors[tensor.name]
        for shard in shards:
            part = next(each for each in shard.pool.geometry.tensors if each.name == tensor.name)
            own = shard.pool.tensors[tensor.name]
            expected = held[:, :, :, part.head_start : part.head_end]
            written = expected.isfinite() & own.isfinite()
            assert written.any()
            differs = (written & ~torch.isclose(own, expected, atol=CLOSE, rtol=CLOSE)).any(-1)
            assert float(differs.sum()) <= flipped * float(written.any(-1).sum()), tensor.name
    offered = [library.offered(each.pool.geometry, number) for number, each in enumerate(shards)]
    found = [part for each in offered if each is not None for part in each.tensors]
    for tensor in one.pool.geometry.tensors:
        heads = sorted(part.head_start for part in found if part.name == tensor.name)
        assert len(set(heads)) == len(heads), "offered once"
        assert sum(part.kv_heads for part in found if part.name == tensor.name) == tensor.kv_heads


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in SERVED]
)
def test_shards_compute_what_transformers_does(kept: Callable[[str], Kept], name: str) -> None:
    model = kept(name)
    one = whole(model.folder)
    library = one._part.spec.library
    assert library is not None
    if (reason := ARCHITECTURES[name].undivided) or library.division is None:
        with pytest.raises(ConfigError, match=f"cannot be divided into shards: {reason or 'a reason'}.*; write --tp 1"):
            split_model(one._part.spec, 2)
        return
    computed([one], model.expected)
    runners, found = zip(*sharded(model, 2), strict=True)
    torch.testing.assert_close(found[0], model.expected.logprobs, atol=CLOSE, rtol=CLOSE)
    check_parts(one, runners)
    assert {each.fingerprint for each in runners} == {one.fingerprint}


@pytest.mark.parametrize(
    ("name", "fields"),
    [("gpt-oss", {"windows": "free"}), ("qwen3", {"quantize": "int8"}), ("qwen3", {"dtype": "bfloat16"})],
    ids=str,
)
def test_shards_of_other_forms(kept: Callable[[str], Kept], name: str, fields: dict[str, Any]) -> None:
    """Windows in rings, 8 bits, 16 bits."""
    model = kept(name)
    alone = computed([whole(model.folder, **fields)], model.expected)
    found = sharded(model, 2, **fields)[0][1]
    gap = (found - alone).abs().mean()
    assert gap < (1e-4 if "windows" in fields else 0.05)


def test_a_number_of_shards_that_divides_nothing(kept: Callable[[str], Kept]) -> None:
    spec = whole(kept("gpt-oss").folder)._part.spec
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM cannot be split over --tp 3, .* write --tp 1 or 2"):
        split_model(spec, 3)


def test_weights_of_a_shard_are_counted(kept: Callable[[str], Kept]) -> None:
    """What the plan of memory says is what a shard holds."""
    source = resolve_source(str(kept("gpt-oss").folder))
    spec, config = library_spec(source), read_config(source, None)
    for shard in split_model(spec, 2):
        part = ModelPart(range(spec.layers), spec.layers, shard.index, shard.count)
        model = on_meta(stage_class(model_class(config), part), config)
        assert weight_count(part_of(spec, shard=shard)) == sum(each.numel() for each in model.parameters())
    assert weight_count(part_of(spec, shard=shard)) < 0.7 * weight_count(part_of(spec))
