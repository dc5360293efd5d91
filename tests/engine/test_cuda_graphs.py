"""Passes through CUDA graphs give what passes without give; with stand-ins for the graphs, on the CPU."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine import runner
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.operations import Alone, Collectives, Done, LinkBroken
from headrace.engine.layers import exchange, graphs, native_decoder
from headrace.engine.layers.graphs import PassGraphs
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.runner import ModelRunner
from tests.engine.graphed import LONGEST, PAGE_SIZE, PAGES, captured, check_same, decoder, make
from tests.engine.models import LATENTS, Prompt, Saved, random_tokens
from tests.engine.recorded_graphs import Device

MOST = 100  # tokens of the largest pass that has graphs: of 1, 2, 4 … 64 and 128
MODELS = ["llama", "qwen3-moe", "deepseek-v3"]
OTHERS = ["llama-bias", "qwen2", "qwen3", *(name for name in LATENTS if name not in MODELS)]


def mixed_passes(seed: int) -> Iterator[list[PlanRow]]:
    """Passes over some requests each: chunks behind prefixes, and rows that decode."""
    random = np.random.default_rng(seed)
    pages = random.permutation(PAGES).tolist()
    each = -(-LONGEST // PAGE_SIZE)
    prompts = [
        Prompt(number, random_tokens(LONGEST, seed + number), pages[number * each : (number + 1) * each], PAGE_SIZE)
        for number in range(4)
    ]
    done = [0] * len(prompts)
    for _ in range(12):
        rows = []
        for number in random.permutation(len(prompts))[: random.integers(1, 5)].tolist():
            count = int(random.choice([1, 1, 2, 5, 17, 40]))
            if done[number] + count < LONGEST:
                rows.append(prompts[number].row(done[number], count))
                done[number] += count
        if rows:
            yield rows


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_passes_are_as_without_graphs(saved: Callable[[str], Saved], device: Device, name: str) -> None:
    """Hidden states, every byte of the pool, and the experts' counts."""
    plain, graphed = make(saved(name).folder), make(saved(name).folder)
    plain.pool.tensor.fill_(torch.nan)
    captured(graphed, MOST)
    counted = [each.expert_rows.counts() if each.expert_rows else np.zeros(1) for each in (plain, graphed)]
    for seed in range(3):
        for rows in mixed_passes(seed):
            before = device.replays
            check_same(graphed.forward(rows), plain.forward(rows))
            check_same(graphed.pool.tensor, plain.pool.tensor)
            tokens = sum(row.count for row in rows)
            assert device.replays - before == (4 if tokens <= 128 else 0), "three layers"
    assert plain.pool.tensor.isnan().any(), "slots of no token"
    if plain.expert_rows and graphed.expert_rows:
        new = [each.counts() - old for each, old in zip((plain.expert_rows, graphed.expert_rows), counted, strict=True)]
        assert new[0].sum() > 0
        assert (new[0] == new[1]).all(), "padding counts for none"


@pytest.mark.parametrize("count", [*range(1, 10), 15, 16, 17, 31, 33, 63, 64, 65, 127, 128])
def test_every_number_of_rows(saved: Callable[[str], Saved], device: Device, count: int) -> None:
    plain, graphed = make(saved("qwen3").folder), make(saved("qwen3").folder)
    plain.pool.tensor.fill_(torch.nan)
    assert captured(graphed, count).holds(count)
    rows = [Prompt(1, random_tokens(count, count), list(range(5, 5 + -(-count // PAGE_SIZE))), PAGE_SIZE).row(0, count)]
    check_same(graphed.forward(rows), plain.forward(rows))
    check_same(graphed.pool.tensor, plain.pool.tensor)


def test_a_result_outlives_the_next_pass(saved: Callable[[str], Saved], device: Device) -> None:
    """The next pass is queued before a result has been sent or sampled from."""
    made = make(saved("llama").folder)
    captured(made, MOST)
    first, second = (Prompt(each, random_tokens(9, each), [2 * each, 2 * each + 1], PAGE_SIZE) for each in (1, 2))
    result = made.forward([first.row(0, 9)])
    kept = result.clone()
    made.forward([second.row(0, 9)])
    assert torch.equal(result, kept)


def test_some_passes_have_no_graphs(saved: Callable[[str], Saved], device: Device) -> None:
    made = make(saved("llama").folder, halves=2)
    captured(made, MOST)
    prompt = Prompt(1, random_tokens(LONGEST, 1), list(range(20)), PAGE_SIZE)
    device.replays = 0
    made.forward([prompt.row(0, 129)])
    made.forward([prompt.row(0, 20)], None, Agreement((20,), cut=8))
    with patch.object(native_decoder, "row_groups", lambda *_: ("a group",)), pytest.raises(ValueError, match="unpack"):
        made.forward([prompt.row(0, 4)])  # goes where adapters are looked for
    assert device.replays == 0
    made.forward([prompt.row(0, 4)])
    assert device.replays == 4


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe"])
def test_experts_that_wait_for_how_many_rows_each_of_them_has(
    saved: Callable[[str], Saved], device: Device, name: str
) -> None:
    made = make(saved(name).folder, grouped=False)
    decoder(made).capture(MOST)
    assert decoder(made)._graphs is None
    assert not device.captured


class Twice(Alone):
    """The first of two shards, beside one that computes the same."""

    size = 2

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of each sum."""
        self.well = True
        """What the other shard says of its graphs."""
        self.gone_after = 1 << 30
        """Sums after which the other shard is gone."""

    def all_reduce(self, x: Tensor) -> Done:
        if x.dtype == torch.int64:  # numbers that each rank gives in its place
            return Done(torch.stack((x[0], x[0] if self.well else torch.zeros_like(x[0]))))
        if len(self.rows) >= self.gone_after:
            raise LinkBroken("the other shard is gone")
        self.rows.append(len(x))
        return Done(x + x)


def shard(folder: Path, tp: Collectives) -> ModelRunner:
    with patch.object(runner, "check_equal_sums", lambda *_: None):
        return make(folder, tp=tp)


SHARDED = ["llama", "qwen3-moe", "deepseek-v3"]


@pytest.mark.parametrize("name", SHARDED)
def test_shards_sum_between_graphs(
    saved: Callable[[str], Saved], device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows as without graphs, as the other shard may do."""
    # Which tokens' shared experts are a shard's follows from the padding; of two that compute the same it makes sums.
    monkeypatch.setattr(exchange, "shard_rows", lambda tokens, *_: slice(0, tokens))
    groups = [Twice(), Twice()]
    plain, graphed = shard(saved(name).folder, groups[0]), shard(saved(name).folder, GraphedCollectives(groups[1]))
    plain.pool.tensor.fill_(torch.nan)
    captured(graphed, MOST)
    for rows in mixed_passes(1):
        before = device.replays
        for group in groups:
            group.rows.clear()
        check_same(graphed.forward(rows), plain.forward(rows))
        check_same(graphed.pool.tensor, plain.pool.tensor)
        assert groups[0].rows == groups[1].rows
        tokens = sum(row.count for row in rows)
        assert device.replays - before == (10 if tokens <= 128 else 0), "three layers"


def test_a_shard_that_is_gone_breaks_a_pass_through_graphs(saved: Callable[[str], Saved], device: Device) -> None:
    group = Twice()
    made = shard(saved("llama").folder, GraphedCollectives(group))
    captured(made, 16)
    group.gone_after = len(group.rows) + 4  # the embedding's, and in the second layer
    with pytest.raises(LinkBroken, match="is gone"):
        made.forward([Prompt(1, random_tokens(9, 1), [3, 4], PAGE_SIZE).row(0, 9)])


def test_a_shard_that_is_gone_while_graphs_are_tried(saved: Callable[[str], Saved], device: Device) -> None:
    group = Twice()
    made = shard(saved("llama").folder, GraphedCollectives(group))
    group.gone_after = len(group.rows) + 2
    with pytest.raises(LinkBroken):
        decoder(made).capture(16)


def test_shards_have_graphs_together_or_not_at_all(
    saved: Callable[[str], Saved], device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    group = Twice()
    made = shard(saved("llama").folder, GraphedCollectives(group))
    agree = PassGraphs._agreed

    def captured_here(graphs: PassGraphs, well: bool) -> bool:
        group.well = device.open is None and not device.captured
        return agree(graphs, well)

    with patch.object(PassGraphs, "_agreed", captured_here):
        [warning] = warnings_of(made, caplog)
    assert warning == "passes run without CUDA graphs: RuntimeError: another shard cannot capture them"
    assert decoder(made)._graphs is None


def test_shards_whose_sums_the_host_waits_for_have_none(saved: Callable[[str], Saved], device: Device) -> None:
    made = shard(saved("llama").folder, Twice())
    decoder(made).capture(MOST)
    assert decoder(made)._graphs is None
    assert not device.captured


def warnings_of(made: ModelRunner, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a capture that fails warns of; passes go on."""
    with caplog.at_level(logging.INFO):
        decoder(made).capture(MOST)
    prompt = Prompt(1, random_tokens(9, 1), [3, 4], PAGE_SIZE)
    assert not made.forward([prompt.row(0, 9)]).isnan().any()
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: operation not permitted\nhelp"), ValueError("anything")])
@pytest.mark.parametrize("at", [0, 6])
def test_a_capture_that_fails(
    saved: Callable[[str], Saved], device: Device, caplog: pytest.LogCaptureFixture, error: Exception, at: int
) -> None:
    made = make(saved("llama").folder)
    gate, calls = TorchArithmetic.gate, []

    def failing(self: TorchArithmetic, gate_up: Tensor) -> Tensor:
        calls.append(device.open)
        if device.open is not None and len(calls) > at:
            device.open.broken = True
            raise error
        return gate(self, gate_up)

    with patch.object(TorchArithmetic, "gate", failing):
        first = str(error).partition("\n")[0]
        assert warnings_of(made, caplog) == [f"passes run without CUDA graphs: {type(error).__name__}: {first}"]
    assert decoder(made)._graphs is None
    assert device.open is None, "the capture has been ended"


def test_graphs_that_compute_something_else_are_not_used(
    saved: Callable[[str], Saved], device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(saved("llama").folder)
    with patch.object(torch.cuda.CUDAGraph, "replay", lambda _: None):
        [warning] = warnings_of(made, caplog)
    assert "differs by" in warning
    assert decoder(made)._graphs is None


def test_a_capture_that_takes_long_leaves_small_passes_without(
    saved: Callable[[str], Saved], device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(saved("llama").folder)
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(graphs.time, "monotonic", lambda: next(clock))
    assert warnings_of(made, caplog) == ["passes of up to 32 tokens run without CUDA graphs: 120 s have passed"]
    found = decoder(made)._graphs
    assert found is not None
    assert [found.holds(tokens) for tokens in (1, 32, 33, 128, 129)] == [False, False, True, True, False]
