"""How shards of a model start: what they read and hold, what they compare, and what they agree on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.operations import Collectives
from headrace.engine.dtypes import Precision
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.checkpoint import Checkpoint, open_checkpoint
from headrace.engine.model.expert_plan import own_experts
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.model.sharding import part_of, split_model
from headrace.engine.model.source import load_spec, resolve_source
from tests.engine.collectives.threads import ThreadCollectives, run_ranks
from tests.engine.models import CONFIGS, Saved, make_runner

Models = Callable[[str, int, int], Saved]


class Differing(ThreadCollectives):
    """Sums of fractions differ in the last bit at one rank."""

    def all_reduce(self, x: Tensor) -> Any:
        done = super().all_reduce(x)
        if self.rank == 1 and x.is_floating_point():
            done.result[-1, -1] = torch.nextafter(done.result[-1, -1], torch.tensor(torch.inf))
        return done


def test_shards_with_different_sums_do_not_start(reshaped: Models) -> None:
    folder = reshaped("llama", 6, 3).folder

    def work(tp: Collectives) -> str:
        assert isinstance(tp, ThreadCollectives)
        tp.__class__ = Differing
        with pytest.raises(ConfigError, match="the 3 shards have different sums after one all-reduce") as caught:
            make_runner(folder, tp=tp)
        return str(caught.value)

    assert len(set(run_ranks(3, work))) == 1


def test_shards_have_equal_pages(reshaped: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a shard with fewer heads has room for more."""
    monkeypatch.setattr("headrace.engine.load_plan.available_memory", lambda _: 1 << 20)
    folder = reshaped("llama", 6, 3).folder

    def work(tp: Collectives) -> tuple[int, int]:
        runner = make_runner(folder, tp=tp, kv_pages=0, max_model_len=32)
        runner.warm_up()
        return runner.pool.pages, runner.geometry.kv_heads

    (pages, heads), (other_pages, other_heads) = run_ranks(2, work)
    assert (heads, other_heads) == (1, 2)
    assert pages == other_pages
    assert 1 < pages < 65536 // 16


# Query biases of deepseek-v2-lite, which it has none of, are held as zeros beside those of its latents.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek-v2-lite"])
def test_weights_of_shards_are_counted_exactly(reshaped: Models, name: str) -> None:
    folder = reshaped(name, 6, 3).folder
    spec = load_spec(resolve_source(str(folder)))

    def work(tp: Collectives) -> int:
        decoder: Any = make_runner(folder, tp=tp)._decoder
        held = {id(tensor): tensor.numel() for tensor in _tensors(decoder)}
        return sum(held.values())

    own = [len(own_experts(spec.moe.experts, 2, rank)) if spec.moe else None for rank in range(2)]
    parts = [part_of(spec, None, shard, held) for shard, held in zip(split_model(spec, 2), own, strict=True)]
    counted = [weight_count(part) for part in parts]
    assert run_ranks(2, work) == counted


def _tensors(decoder: Any) -> Iterator[Tensor]:
    yield decoder._norm
    yield from (decoder._vocabulary._embedding, decoder._vocabulary._head)
    yield from _floating(decoder._layers)


def _floating(part: object) -> Iterator[Tensor]:
    """Weights in a layer, or a part of it; counters of rows are none."""
    if isinstance(part, Tensor):
        if part.is_floating_point():
            yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _floating(each)
    elif type(part).__module__.startswith("headrace.engine.layers."):
        yield from _floating(list(vars(part).values()))


class Counting:
    """A checkpoint that counts the numbers read from it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.numbers = 0

    def read(self, *arguments: Any) -> Tensor:
        tensor = self._checkpoint.read(*arguments)
        self.numbers += tensor.numel()
        return tensor

    def read_int8(self, *arguments: Any) -> Int8Weight | None:
        return self._checkpoint.read_int8(*arguments)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_a_shard_reads_its_part_only(reshaped: Models, name: str) -> None:
    source = resolve_source(str(reshaped(name, 6, 3).folder))
    spec = load_spec(source)
    precision = Precision(torch.float32, torch.float32, torch.float32)
    for shard in split_model(spec, 2):
        counting = Counting(open_checkpoint(source, spec))
        NativeDecoder(
            spec, counting, range(spec.layers), positions=64, precision=precision, arithmetic=TorchArithmetic(),
            device="cpu", shard=shard,
        )  # fmt: skip
        padding = shard.vocabulary_block - len(shard.vocabulary)
        assert counting.numbers == weight_count(part_of(spec, None, shard)) - 2 * padding * spec.hidden_size
