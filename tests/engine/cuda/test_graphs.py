"""CUDA graphs at the widths of large models: how few launches a pass takes, and that memory is used in order."""

import logging
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.engine.collectives.steps import Steps
from headrace.engine.kv.memory_plan import GRAPH_BYTES, activation_bytes, graph_bytes
from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.graphs import PassGraphs
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.model.graph_sizes import graph_sizes
from headrace.engine.runner import ModelRunner
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.cuda.models import LONGEST, MODELS, WIDTHS, fake_runner, incoming, row

LAYERS = 2
DECODING = [row(request, 800 + request, 1, first_page=request * 60) for request in range(1, 9)]
BATCHES = {
    "one row": DECODING[:1],
    "decode": DECODING,
    "decode, padded": DECODING[:7],
    "512 tokens": [row(1, 0, 512)],
    "1,024 tokens": [row(1, 100, 1000), *(row(each, 800, 1, first_page=100 + 60 * each) for each in range(2, 26))],
}


def graphs_of(made: ModelRunner) -> PassGraphs | None:
    assert isinstance(made._decoder, NativeDecoder)
    return made._decoder._graphs


def few(made: ModelRunner, tokens: int = 16) -> None:
    """Graphs of a few sizes."""
    made._decoder.capture(tokens)
    assert graphs_of(made) is not None


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[pytest.mark.full] * batch.endswith(" tokens")) for batch in BATCHES]
)
def test_a_pass_takes_a_launch_for_each_graph(gpu: FakeGpu, tmp_path: Path, name: str, batch: str) -> None:
    """Attention, and sums over shards, are between them."""
    rows = BATCHES[batch]
    with fake_runner(gpu, tmp_path, name, LAYERS) as made:
        few(made, sum(each.count for each in rows))
        hidden = incoming(made, rows)
        with gpu.counted() as counts:
            made.forward(rows, hidden)
    assert not counts.syncs, counts.described()
    launched = counts.operations()
    shards = MODELS[name].shards > 1
    assert launched["[graph]"] == (3 if shards else 1) * LAYERS + 1
    in_attention = ("engine/attention/", "engine/layers/latent_attention.py")
    attention = sum(count for (_, line), count in counts.launches.items() if line.startswith(in_attention))
    most = 14
    if "deepseek" in name:
        most += len(rows)  # where the latents of each row are
    else:
        assert launched["_varlen_attn"] == LAYERS
    # Of each layer the copy of what attention gives, too.
    beside = counts.launches.total() - attention - launched["[graph]"] - LAYERS
    assert beside <= most, counts.described()


def test_without_graphs_a_layer_takes_more(gpu: FakeGpu, tmp_path: Path) -> None:
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", LAYERS) as made, gpu.counted() as counts:
        made.forward(DECODING, incoming(made, DECODING))
    assert counts.launches.total() > 4 * LAYERS + 15
    assert not counts.operations()["[graph]"]


def test_a_start_captures_all_sizes(gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True) as made, caplog.at_level(logging.INFO):
        made.warm_up(LONGEST)
        graphs = graphs_of(made)
        assert graphs is not None
        assert [size for size in range(1, 1100) if graphs.holds(size)] == list(range(1, 1025))
        assert graph_sizes(0) == (
            1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
        )  # fmt: skip
        captured = [record.message for record in caplog.records if "captured" in record.message]
        assert captured[0] == "CUDA graphs of 1024 tokens captured, 1 of 18 sizes"
        assert captured[17] == "CUDA graphs of 1 tokens captured, 18 of 18 sizes"
        assert captured[18].startswith("36 CUDA graphs were captured in ")


def test_a_start_captures_none_unless_it_may(gpu: FakeGpu, tmp_path: Path) -> None:
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1, whole=True, cuda_graphs="off") as made:
        made.warm_up(LONGEST)
        assert graphs_of(made) is None


@pytest.mark.parametrize("way", ["allgather", "alltoall"])
def test_experts_of_several_replicas_have_none(gpu: FakeGpu, tmp_path: Path, way: str) -> None:
    with fake_runner(gpu, tmp_path, "qwen3-30b-a3b", way=way) as made:  # type: ignore[arg-type]
        made._decoder.capture(16)
        assert graphs_of(made) is None


def test_layers_that_wait_have_none(gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wait within a capture is an error, as it is on a GPU."""

    def waiting(_: DenseMlp, normed: Tensor, *__: object) -> Steps[Tensor]:
        yield from ()
        return normed.mul(normed.sum().item())

    with fake_runner(gpu, tmp_path, "llama-3.1-8b", 1) as made:
        with patch.object(DenseMlp, "steps", waiting):
            made._decoder.capture(16)
        assert graphs_of(made) is None
    assert "without CUDA graphs: RuntimeError: operation not permitted when stream is capturing" in caplog.text


@pytest.mark.parametrize("name", WIDTHS)
def test_memory_of_graphs_is_estimated_from_above(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    """Beside that of the graphs themselves, which nothing here has."""
    with fake_runner(gpu, tmp_path, name) as made:
        before = gpu.peak = gpu.live
        with patch.object(PassGraphs, "_try", lambda *_: None):  # as any pass without graphs
            few(made, 1024)
        graphs = len(graph_sizes(1024)) * ((3 if MODELS[name].shards > 1 else 1) * LAYERS + 1)
        estimate = graph_bytes(made._part, "bfloat16", graph_sizes(1024)) - graphs * GRAPH_BYTES
        slack = 2.5 if made.expert_rows else 1.6  # in FP8 rows of experts are taken and gated apart
        assert gpu.peak - before <= estimate <= slack * (gpu.peak - before)


def compute(made: ModelRunner, rows: Sequence[PlanRow]) -> Tensor:
    return made.forward(rows, incoming(made, rows))


def send(side: torch.cuda.Stream, result: Tensor) -> Tensor:
    """Begin to copy a result to the host beside what the device computes next."""
    event = torch.cuda.current_stream().record_event()  # type: ignore[no-untyped-call]
    side.wait_event(event)
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(result, non_blocking=True)
    result.record_stream(side)
    return host


def test_passes_that_are_queued_one_behind_the_other_are_in_order(gpu: FakeGpu, tmp_path: Path) -> None:
    """While results of the ones before are on their way."""
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", LAYERS) as made:
        few(made)
        side = torch.cuda.Stream(made.hidden_spec.device)  # type: ignore[no-untyped-call]
        sent = [send(side, compute(made, DECODING[: 8 - each])) for each in range(3)]
        side.synchronize()
        assert len(sent) == 3


def test_a_result_in_a_buffer_of_the_graphs_would_be_found(guard: str, tmp_path: Path) -> None:
    gpu = FakeGpu(guard)
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", LAYERS) as made:
        few(made)
        side = torch.cuda.Stream(made.hidden_spec.device)  # type: ignore[no-untyped-call]
        with patch.object(Tensor, "clone", lambda tensor: tensor):
            send(side, compute(made, DECODING))
        assert not gpu.races
        compute(made, DECODING)
        assert any(race.what == "write after read" for race in gpu.races)


def test_replays_on_another_stream_would_be_found(guard: str, tmp_path: Path) -> None:
    """Buffers are in order because all that uses them is on one stream."""
    gpu = FakeGpu(guard)
    with fake_runner(gpu, tmp_path, "llama-3.1-8b", LAYERS) as made:
        few(made)
        side = torch.cuda.Stream(made.hidden_spec.device)  # type: ignore[no-untyped-call]
        replay = torch.cuda.CUDAGraph.replay

        def elsewhere(graph: torch.cuda.CUDAGraph) -> None:
            with torch.cuda.stream(side):
                replay(graph)

        with patch.object(torch.cuda.CUDAGraph, "replay", elsewhere):
            compute(made, DECODING)
        assert {race.what for race in gpu.races} >= {"read after write", "write after read"}


def test_the_pool_leaves_room_for_graphs(gpu: FakeGpu, tmp_path: Path) -> None:
    with fake_runner(gpu, tmp_path, "llama-3.1-8b") as made:
        part = made._part
    whole = part._replace(layers=range(32))
    assert 300 << 20 < graph_bytes(whole, "bfloat16", graph_sizes(0)) < 400 << 20
    assert graph_bytes(whole, "bfloat16", graph_sizes(0)) < activation_bytes(whole, "bfloat16", 8192, LONGEST)
