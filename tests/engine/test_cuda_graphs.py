"""Passes through CUDA graphs give what passes without give; with stand-ins for the graphs, on the CPU."""

import logging
from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine.layers import graphs, native_decoder
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.runner import ModelRunner
from tests.engine.graphed import LONGEST, PAGE_SIZE, PAGES, captured, check_same, decoder, make
from tests.engine.models import Prompt, Saved, random_tokens
from tests.engine.recorded_graphs import Device

MOST = 100  # tokens of the largest pass that has graphs: of 1, 2, 4 … 64 and 128
MODELS = ["llama", "llama-bias", "qwen2", "qwen3", "qwen3-moe"]


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


@pytest.mark.parametrize("name", MODELS)
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
def test_some_models_have_none(saved: Callable[[str], Saved], device: Device, name: str) -> None:
    """Latents, and experts that wait for how many rows each of them has."""
    made = make(saved(name).folder, grouped=False) if name != "deepseek-v3" else None
    if made is None:
        model = ModelConfig(model=str(saved(name).folder), dtype="float32", device="cpu")
        made = ModelRunner(plan_rank(model, EngineConfig(kv_pages=PAGES, page_size=PAGE_SIZE, threads=1), LONGEST))
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
