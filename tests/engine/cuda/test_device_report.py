"""What a start on a GPU logs of what it found and chose."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.engine.device_report import BUFFER_BYTES, SIDE, measure_rates
from tests.engine.attention import fake_flashinfer
from tests.engine.cuda.fake_gpu import Event, FakeGpu
from tests.engine.cuda.models import fake_runner

DEVICE = torch.device("cuda:0")


def lines(gpu: FakeGpu, folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of a start with a layer of Llama-3.1-8B."""
    with fake_runner(gpu, folder, "llama-3.1-8b", 1, whole=True) as made, caplog.at_level(logging.INFO):
        made._pass_tokens = 2048
        made.warm_up()
    return [record.message for record in caplog.records if record.name == "headrace.engine.device_report"]


def test_a_start_says_what_it_found_and_chose(gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_flashinfer.installed():
        found = lines(gpu, tmp_path, caplog)
    assert found == [
        "cuda:0 is No GPU, compute capability 9.0; 8,192,000 of 81,920 MiB were free; it reaches 137 TFLOP/s in "
        "bfloat16 and 268 GB/s of memory",
        "attention by FlashInfer; layers by Triton's kernels; weights in bfloat16; passes of up to 2,048 tokens; "
        "KV of 65,536 tokens in 0.3% of its memory",
    ]


def test_it_says_why_it_chose_less(gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [_, chosen] = lines(gpu, tmp_path, caplog)
    why = "(FlashInfer: it is not installed: pip install 'headrace[flashinfer]')"
    assert chosen.startswith(f"attention by torch's flash kernel behind a gather {why}; layers by ")


def test_where_memory_is_short_it_starts_all_the_same(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "normal_", short)
    [found, _] = lines(gpu, tmp_path, caplog)
    assert found.endswith("MiB were free; no memory is left to measure its rates in")


@pytest.fixture
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Milliseconds of the rounds that follow."""
    times: list[float] = []
    monkeypatch.setattr(Event, "elapsed_time", lambda *_: times.pop(0))
    yield times
    assert not times


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rates_are_those_of_the_fastest_round(gpu: FakeGpu, elapsed: list[float], dtype: torch.dtype) -> None:
    elapsed += [4.0, 2.0, 3.0, 1.0, 0.5, 0.7]
    with gpu, gpu.counted() as counts:
        rates = measure_rates(DEVICE, dtype)
    assert rates is not None
    assert rates.product == 2 * SIDE**3 / 2e-3
    assert rates.memory == BUFFER_BYTES / 0.5e-3
    assert counts.operations()["mm"] == counts.operations()["copy_"] == 4, "one of them to warm up"
    assert counts.flops == 4 * 2 * SIDE**3
    assert counts.syncs.total() == 2
