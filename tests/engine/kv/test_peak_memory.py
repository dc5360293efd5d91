"""Memory of a running stage: that of its plan, and the same for prompts of every length, whatever the chunk."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from tests.engine.models import save_model

MIB = 1 << 20
PAGES, PAGE = 512, 16
LENGTH = PAGES * PAGE
MEASURE = f"""
import json, re, sys
from pathlib import Path
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner

def status(field):
    return int(re.search(rf"^{{field}}:\\s*(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    work()
    return status("VmHWM")

def make_runner(pages, length):
    model = ModelConfig(model=sys.argv[1], dtype="float32", device="cpu")
    return ModelRunner(plan_rank(model, EngineConfig(page_size={PAGE}, kv_pages=pages, threads=1), length))

def compute(runner, length, chunk):
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        pages = packed.pack(range(-(-(start + count) // {PAGE})))
        sample = SamplingParams(temperature=0.0) if start + count == length else None
        runner.execute([PlanRow(1, start, count, pages, packed.pack([7] * count), sample=sample)])
    runner.release(1)

chunk = int(sys.argv[2])
make_runner(16, 256).warm_up()  # what libraries allocate once
before = status("VmRSS")
runner = make_runner({PAGES}, {LENGTH})
runner.pool.tensor.zero_()
held = status("VmRSS") - before
runner.warm_up(chunk)
peaks = {{}}
for length in (1, 300, 1024, {LENGTH}):
    peaks[length] = peak(lambda: compute(runner, length, chunk)) - before
print(json.dumps({{"held": held, "kv": runner.pool.tensor.nbytes, "peaks": peaks}}))
"""


class Measured(msgspec.Struct):
    held: int
    """Bytes that a loaded runner takes."""
    kv: int
    peaks: dict[int, int]
    """Bytes at the most while a prompt of so many tokens was computed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return save_model(config, tmp_path_factory.mktemp("model")).folder


@pytest.mark.parametrize("chunk", [256, pytest.param(1024, marks=pytest.mark.full)])
def test_long_prompts_take_no_more_memory_than_short_ones(folder: Path, chunk: int) -> None:
    """In a process of its own, whose high-water mark nothing else moves. A score for each pair of positions in a chunk
    would take 33 MB for the longest one."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(chunk)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    measured = msgspec.json.decode(done.stdout, type=Measured)
    assert measured.kv == 2 * 2 * 2 * 32 * LENGTH * 4
    assert measured.held == pytest.approx(measured.kv, abs=8 * MIB)  # the weights are small
    assert max(measured.peaks.values()) - measured.peaks[1024] <= 6 * MIB, measured.peaks
    assert measured.peaks[1024] <= measured.held + 8 * MIB, measured.peaks
