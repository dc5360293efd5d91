"""What forward passes of large models cost on a GPU: launches, bytes and waits, held to budgets.toml."""

import logging
import tomllib
from pathlib import Path

import pytest
import torch

from headrace.core.config import Compile
from headrace.core.messages.orders import PlanRow
from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine.kv.memory_plan import activation_bytes
from headrace.engine.model.expert_plan import Way
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.cuda.models import LONGEST, MODELS, fake_runner, incoming, pass_cost, row

BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text(encoding="utf-8"))
COMPILED: tuple[Compile, ...] = ("off", "on", "products")
BATCHES: dict[str, list[PlanRow]] = {
    "prompt": [row(1, 0, 2048)],
    "mixed": [
        row(1, 4096, 1000),
        row(2, 0, 500, first_page=400),
        *(row(request, 800, 1, first_page=500 + request * 60) for request in range(3, 7)),
    ],
    "decode": [row(request, 800 + request, 1, first_page=request * 60) for request in range(1, 9)],
}


@pytest.mark.parametrize(
    ("wanted", "name", "batch"),
    [("on", name, batch) for name in BUDGETS for batch in BATCHES] + [("products", name, "prompt") for name in BUDGETS],
)
def test_a_pass_stays_within_its_budget(gpu: FakeGpu, tmp_path: Path, wanted: Compile, name: str, batch: str) -> None:
    budget = BUDGETS[name]["products" if wanted == "products" else batch]
    cost = pass_cost(gpu, tmp_path, name, BATCHES[batch], compiled=wanted)
    spent = {
        "layer": cost.layer_launches,
        "rest": cost.pass_launches,
        "megabytes": round(cost.layer_bytes / 1e6),
        "syncs": cost.counts.syncs.total(),
    }
    exceeded = {what: count for what, count in spent.items() if count > budget.get(what, 0)}
    assert not exceeded, f"{exceeded} of a budget of {budget}\n{cost.counts.described()}"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b-tp4"])
def test_our_kernel_over_pages_gathers_no_keys_and_values(gpu: FakeGpu, tmp_path: Path, name: str, batch: str) -> None:
    """A launch of each layer less than torch's flash kernel takes, and no wait of the host."""
    budget = BUDGETS[name][batch]
    cost = pass_cost(gpu, tmp_path, name, BATCHES[batch], "triton")
    assert (cost.layer_launches, cost.counts.syncs.total()) == (budget["layer"] - 1, 0), cost.counts.described()
    spec, positions = MODELS[name], sum(each.start + each.count for each in BATCHES[batch])
    gathered = 4 * positions * 2 * 128 * spec.config["num_key_value_heads"] // spec.shards  # read, and written
    assert cost.layer_bytes / 1e6 == pytest.approx(budget["megabytes"] - gathered / 1e6, abs=1.5)


def test_every_model_has_a_budget() -> None:
    assert set(BUDGETS) == set(MODELS)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_halves_of_a_pass_wait_for_nothing(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    rows = [row(1, 0, 600), row(2, 32, 400, first_page=100)]
    with fake_runner(gpu, tmp_path, name, halves=True) as made:
        hidden = incoming(made, rows)
        with gpu.counted() as counts:
            made.forward(rows, hidden, Agreement((1000,), cut=500))
    assert not counts.syncs, counts.described()


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3-tp8"])
@pytest.mark.parametrize("way", ["allgather", "alltoall"])
def test_replicas_that_share_experts_wait_for_nothing(gpu: FakeGpu, tmp_path: Path, name: str, way: Way) -> None:
    rows = [row(1, 0, 1500)]
    with fake_runner(gpu, tmp_path, name, way=way) as made:
        hidden = incoming(made, rows)
        with gpu.counted() as counts:
            made.forward(rows, hidden, Agreement((1500, 200), 1500))
    assert not counts.syncs, counts.described()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3-tp8"])
def test_products_in_float8_wait_for_nothing(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    rows = [row(1, 0, 1500)]
    with fake_runner(gpu, tmp_path, name, count=1, float8=True) as made:
        hidden = incoming(made, rows)
        with gpu.counted() as counts:
            made.forward(rows, hidden)
    assert not counts.syncs, counts.described()
    assert counts.operations()["[scaled_product]"] == counts.operations()["[quantize]"] >= 4


def test_a_mistake_in_devices_is_an_error_here(gpu: FakeGpu) -> None:
    with gpu, pytest.raises(RuntimeError, match=r"two( different)? devices,? cuda:0(,| and) cpu"):
        torch.ones(3, device="cuda") + torch.ones(3)


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_estimated_from_above(gpu: FakeGpu, tmp_path: Path, name: str, tokens: int) -> None:
    """Beside which the KV pool is sized, with products of our own or without."""
    peaks = []
    for compiled in COMPILED:
        with fake_runner(gpu, tmp_path, name, compiled=compiled) as made:
            before = gpu.peak = gpu.live
            rows = [row(1, 0, tokens)]
            made.forward(rows, incoming(made, rows))
            estimate = activation_bytes(made._part, "bfloat16", tokens, LONGEST)
            peaks.append(gpu.peak - before)
    assert max(peaks[1:]) <= estimate <= 1.8 * max(peaks)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_products_of_our_own_take_no_more_memory(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    peaks = []
    for compiled in COMPILED:
        with fake_runner(gpu, tmp_path, name, compiled=compiled) as made:
            before = gpu.peak = gpu.live
            rows = [row(1, 0, 2048)]
            made.forward(rows, incoming(made, rows))
            peaks.append(gpu.peak - before)
    assert peaks[2] <= peaks[1] <= peaks[0]


def test_a_start_tries_the_largest_pass(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", whole=True) as made, caplog.at_level(logging.INFO):
        made._pass_tokens = LONGEST + 5
        made.warm_up(LONGEST + 1000)
        assert f"a pass of {LONGEST + 5} tokens takes" in caplog.text
        assert "libraries and links took 0 MiB of cuda:0 since the weights" in caplog.text

        def short(rows: list[PlanRow], *_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(made, "forward", short)
        with pytest.raises(
            ConfigError, match=r"^a pass of 100 tokens does not fit on cuda:0 .* smaller --chunk-tokens"
        ):
            made._try_largest_pass(100)
