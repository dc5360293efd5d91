"""What is to be run first on a GPU: the machine, kernels, whole passes, KV on its way, in ten minutes at the most.

`python -m benchmarks.first_gpu_minutes`, no network and no model files: weights of published shapes are made on the
device. Every part goes on when another fails or its time is over; what is worth keeping is printed again at
the end. `--device cpu --tiny` runs every part that a CPU can.
"""

import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import add_threads, make_parser
from benchmarks.first_gpu_attention import attention
from benchmarks.first_gpu_kernels import gap_of, own_kernels
from benchmarks.first_gpu_servers import servers
from benchmarks.profile import PAGE, rows_of
from benchmarks.report import console, run
from benchmarks.shapes import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B_A3B
from benchmarks.utilisation import chunk_flops, device_name, peak, seconds, synchronize
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.kv.backends import CudaIpcMemory, PoolMemory
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.requests.request import SamplingParams
from headrace.engine import runner as runner_module
from headrace.engine.device import resolve_device
from headrace.engine.kv.cuda_ipc_pages import CudaIpcTransport
from headrace.engine.kv.device_pages import DevicePages, device_memory, pinned_bytes
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import pool_pages
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner
from headrace.transfer.backends.cuda_driver import CudaIpc
from headrace.transfer.backends.cuda_ipc import TEARDOWN_S, CudaIpcPool
from headrace.transfer.backends.strided_pool import StridedPool, c_order
from headrace.transfer.data.payload import Passage, frames, pieces, write_frames
from headrace.transfer.protocol.layout import Bytes, copies
from headrace.transfer.protocol.page_store import SourceStore

ROUNDS = 3
SESSION = "s" * 32
LLAMA_8B_KV = Geometry("bfloat16", 32, 8, 128, 16)
WEIGHTS = 0.02  # their standard deviation
SHAPES = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-30B-A3B, 12 layers": QWEN3_30B_A3B | {"num_hidden_layers": 12},
    "DeepSeek-V3, 4 layers of 64 experts": DEEPSEEK_V3 | {"num_hidden_layers": 4, "n_routed_experts": 64},
}
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 199,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
_TINY_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY_MLA = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
TINY_SHAPES = {
    "Llama, tiny": LLAMA_8B | _TINY,
    "Qwen3-MoE, tiny": QWEN3_30B_A3B | _TINY | _TINY_MOE,
    "DeepSeek, tiny": DEEPSEEK_V3 | _TINY | _TINY_MLA,
}


@dataclass
class Minutes:
    """What the parts share: the device, the time, and what is printed again at the end."""

    device: torch.device
    tiny: bool
    until: float
    """time.perf_counter() at which no further part begins."""
    peak: float = 1.0
    """FLOP/s of one large matrix product in bfloat16."""
    kept: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def shapes(self) -> dict[str, dict[str, Any]]:
        """Configurations of the models."""
        return TINY_SHAPES if self.tiny else SHAPES

    def keep(self, text: str) -> None:
        """Print a line, and again at the end."""
        console.print(text, highlight=False, soft_wrap=True)
        self.kept.append(text)

    def time(self, compute: Callable[[], object]) -> float:
        """Median seconds of some rounds, after one to warm up."""
        return statistics.median([seconds(self.device, compute) for _ in range(ROUNDS + 1)][1:])

    def share(self, flops: float, taken: float) -> str:
        """FLOPs in so many seconds as a share of the peak."""
        return f"{flops / taken / self.peak:.2f} of the peak"


class DeviceWeights:
    """A checkpoint of random weights, made on the device when they are asked for; the same for the same name."""

    def __init__(self, device: torch.device) -> None:
        """device: of the model."""
        self._device = device

    def read(
        self, name: str, shape: Sequence[int], rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
    ) -> Tensor:
        """As SafetensorsCheckpoint."""
        height, width = len(rows) if rows is not None else shape[0], list(shape[1:])
        width = [len(columns)] if columns is not None else width
        if not width:
            return torch.ones(height, dtype=torch.bfloat16, device=self._device)
        random = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return (torch.randn(height, *width, generator=random, device=self._device) * WEIGHTS).bfloat16()

    def read_int8(self, *_: object, **__: object) -> None:
        """None of them is in 8 bits."""


@contextlib.contextmanager
def model(at: Minutes, config: dict[str, Any], positions: int, dtype: str = "bfloat16") -> Iterator[ModelRunner]:
    """A runner of such a model for sequences of so many positions, twice of which fit."""
    pages = 2 * ceil_div(positions, PAGE)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(runner_module, "open_checkpoint", lambda *_: DeviceWeights(at.device)),
        patch.object(runner_module, "fingerprint", lambda *_: "random"),
    ):
        Path(folder, "config.json").write_text(json.dumps(config))
        chosen = ModelConfig(model=folder, dtype=dtype, device=str(at.device))  # type: ignore[arg-type]
        engine = EngineConfig(page_size=PAGE, kv_pages=pages, threads=torch.get_num_threads())
        yield ModelRunner(plan_rank(chosen, engine, positions))
    if at.on_gpu:
        torch.cuda.empty_cache()


def machine(at: Minutes) -> None:
    """Rates of the device: a product, its memory, and its link to the host."""
    at.keep(f"{device_name(at.device)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    at.peak = peak(at.device, torch.bfloat16)
    at.keep(f"peak: {at.peak / 1e12:,.2f} TFLOP/s, one product in bfloat16")
    size = 1 << (24 if at.tiny else 30)
    one = torch.ones(size, dtype=torch.uint8, device=at.device)
    other, host = torch.empty_like(one), torch.empty(size, dtype=torch.uint8, pin_memory=at.on_gpu)
    for name, moved, target, source in (
        ("memory", 2 * size, other, one), ("to the host", size, host, one), ("from the host", size, one, host),
    ):  # fmt: skip
        taken = at.time(lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
        at.keep(f"{name}: {moved / taken / 1e9:,.1f} GB/s")


def experts(at: Minutes) -> None:
    """Experts by themselves, as shares of the peak, beside a float32 reference."""
    count, top, width, inner = (4, 2, 64, 32) if at.tiny else (128, 8, 2048, 768)
    for tokens in (16,) if at.tiny else (512, 2048, 8192):
        x = torch.randn(tokens, width, device=at.device, dtype=torch.bfloat16)
        weights = torch.randn(count, width, 2 * inner, device=at.device, dtype=torch.bfloat16) * 0.02
        chosen = torch.rand(tokens, count, device=at.device).topk(top).indices.flatten()
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=count).cumsum(0).to(torch.int32)
        rows = x[order // top]
        found = F.grouped_mm(rows, weights, offs=ends)
        expected = torch.bmm(rows[:64, None].float(), weights[chosen[order[:64]]].float())[:, 0]
        gap = float((found[:64].float() - expected).norm() / expected.norm())
        taken = at.time(lambda rows=rows, weights=weights, ends=ends: F.grouped_mm(rows, weights, offs=ends))  # type: ignore[misc]
        flops = 2.0 * tokens * top * width * 2 * inner
        at.keep(f"experts, {tokens:,} tokens, grouped_mm: {at.share(flops, taken)}; differs by {gap:.1e} of float32")


def correctness(at: Minutes) -> None:
    """A prompt in one chunk, in three, and in float32: the last hidden state."""
    tokens = 48 if at.tiny else 384
    ids = [(7 * number + 3) % 100 for number in range(tokens)]
    for name, config in at.shapes.items():
        small = config | {"num_hidden_layers": 2 if "deepseek" not in config["model_type"] else 4}
        last: dict[str, Tensor] = {}
        for dtype in ("bfloat16", "float32"):
            with model(at, small, 512, dtype) as made:
                whole = made.forward(rows_of(ids, tokens))[-1].float().cpu()
                third = [made.forward([row]) for row in rows_of(ids, tokens // 3)][-1][-1].float().cpu()
            last[dtype] = whole
            at.keep(f"{name}, {dtype}: three chunks differ from one by {gap_of(third, whole):.1e}")
        at.keep(f"{name}: bfloat16 differs from float32 by {gap_of(last['bfloat16'], last['float32']):.1e}")


def passes(at: Minutes) -> None:
    """Whole passes: tokens/s, share of the peak, and how long the host takes to queue them."""
    lengths = (32, 128) if at.tiny else (512, 2048, 8192, 32768)
    for name, config in at.shapes.items():
        with model(at, config, max(lengths) + PAGE) as made:
            made.warm_up()
            for tokens in lengths:
                rows = rows_of([(7 * number + 3) % 100 for number in range(tokens)], tokens)
                taken = at.time(lambda rows=rows: made.execute(rows))  # type: ignore[misc]
                started = time.perf_counter()
                made.forward(rows)
                queued = time.perf_counter() - started
                synchronize(at.device)
                flops = chunk_flops(made._part.spec, tokens)
                at.keep(
                    f"{name}, {tokens:,} tokens: {tokens / taken:,.0f} tokens/s, {at.share(flops, taken)}; queued in "
                    f"{1e3 * queued:.1f} of {1e3 * taken:.1f} ms"
                )
            if at.on_gpu:
                at.keep(f"{name}: {launches(made)}")


def graphs(at: Minutes) -> None:
    """Rows that decode, and short passes, with CUDA graphs and without."""
    if not at.on_gpu:
        at.keep("CUDA graphs: needs CUDA")
        return
    for name, config in at.shapes.items():
        with model(at, config, 2048) as made:
            kinds = {f"{count} decoding": [decoding_row()] * count for count in (1, 8, 64)}
            kinds |= {f"{tokens:,} tokens": rows_of([5] * tokens, tokens) for tokens in (512, 1024)}
            plain = {kind: pass_times(at, made, rows) for kind, rows in kinds.items()}
            expected = made.forward(kinds["512 tokens"]).float()
            torch.cuda.empty_cache()
            before, began = torch.cuda.mem_get_info(at.device)[0], time.perf_counter()
            made._decoder.capture(0)
            taken, held = time.perf_counter() - began, before - torch.cuda.mem_get_info(at.device)[0]
            if getattr(made._decoder, "_graphs", None) is None:
                at.keep(f"{name}: no CUDA graphs")
                continue
            gap = gap_of(made.forward(kinds["512 tokens"]).float(), expected)
            at.keep(f"{name}: graphs captured in {taken:.1f} s, {held >> 20} MiB; 512 tokens differ by {gap:.1e}")
            for kind, rows in kinds.items():
                at.keep(f"{name}, {kind}: {plain[kind]} without graphs, {pass_times(at, made, rows)} with")


def decoding_row() -> PlanRow:
    """A token behind a prefix."""
    return PlanRow(1, 500, 1, packed.pack(range(ceil_div(501, PAGE))), packed.pack([5]))


def pass_times(at: Minutes, made: ModelRunner, rows: list[PlanRow]) -> str:
    """How long a pass takes, and how long the host takes to queue it."""
    taken = at.time(lambda: made.forward(rows))
    started = time.perf_counter()
    made.forward(rows)
    queued = time.perf_counter() - started
    synchronize(at.device)
    return f"{1e3 * taken:.2f} ms ({1e3 * queued:.2f} to queue)"


def launches(made: ModelRunner) -> str:
    """Launches and waits of a pass of 2,048 tokens, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    rows = rows_of([5] * 2048, 2048)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        made.forward(rows)
    table = found.key_averages()
    count = sum(each.count for each in table if "LaunchKernel" in each.key)
    waits = sum(each.count for each in table if "Synchronize" in each.key)
    return f"{count:,} launches, {count / made._part.spec.layers:.0f} a layer; {waits} waits"


def pages(at: Minutes) -> None:
    """KV of 2,048 tokens of Llama-3.1-8B out of the device and into it, as handoffs and the host tier move it."""
    geometry = Geometry("bfloat16", 2, 2, 16, 16) if at.tiny else LLAMA_8B_KV
    pool = KVPool(geometry, 512, str(at.device))
    store = store_of(pool)
    passage = Passage(geometry, geometry, 0, 2048)
    numbers = list(range(128, 256))
    size = 2048 * geometry.token_bytes

    at.keep(f"KV out of the device: {size / at.time(lambda: taken_out(store, passage, numbers)) / 1e9:.1f} GB/s")
    sent = taken_out(store, passage, numbers)
    at.keep(f"KV into the device: {size / at.time(lambda: put_in(store, passage, numbers, sent)) / 1e9:.1f} GB/s")
    tier, copied = HostStore(len(numbers), geometry.page_bytes), pool_pages(pool)

    def stored() -> None:
        for slot, page in enumerate(copied.read(numbers)):
            tier.put(slot, page)

    def loaded() -> None:
        for slot, page in enumerate(numbers):
            copied.write(page, tier.get(slot))
        copied.flush()

    rates = [f"{size / at.time(each) / 1e9:.1f}" for each in (stored, loaded)]
    at.keep(f"pages to the host tier, and from it: {' and '.join(rates)} GB/s")


def taken_out(store: SourceStore, passage: Passage, pages: list[int]) -> list[Bytes]:
    """The payload frames of a passage, in host memory."""
    read = store.begin_read(pieces(passage, pages))
    assert read is not None
    while not read.done:
        pass
    return frames(read.pages, passage, pages)


def put_in(store: SourceStore, passage: Passage, pages: list[int], payload: list[Bytes]) -> None:
    """Write the payload frames of a passage into a pool."""
    written = write_frames(store, copies(*passage), pages, [frame.data for frame in payload])
    while not written.done:
        pass


def store_of(pool: KVPool) -> SourceStore:
    """A pool as handoffs see it."""
    if pool.tensor.device.type == "cpu":
        return pool
    return DevicePages(pool, pinned_bytes(pool.geometry, 2048))


def handoff(at: Minutes) -> None:
    """A prompt's KV from one model to another on this device, which then generates as one model alone."""
    tokens, more = (40, 8) if at.tiny else (1000, 32)
    name, config = next(iter(at.shapes.items()))
    small = config | {"num_hidden_layers": 2}
    ids = [(11 * number + 5) % 150 for number in range(tokens)]
    with model(at, small, 2048 if not at.tiny else 256) as one, model(at, small, 2048 if not at.tiny else 256) as other:
        alone = generated(one, ids, one.execute(rows_of(ids, tokens)).samples[0].token, more)
        first = one.execute(rows_of(ids, tokens)).samples[0].token
        passage = Passage(one.geometry, other.geometry, 0, tokens)
        numbers = list(range(ceil_div(tokens, PAGE)))
        put_in(store_of(other.pool), passage, numbers, taken_out(store_of(one.pool), passage, numbers))
        handed = generated(other, ids, first, more)
    same = sum(mine == theirs for mine, theirs in zip(handed, alone, strict=True))
    at.keep(f"{name}, 2 layers, handed over after {tokens:,} tokens: {same} of {more} tokens as alone")


def generated(made: ModelRunner, ids: list[int], token: int, more: int) -> list[int]:
    """Greedy tokens behind a prompt whose KV is in the pool, and its first token."""
    found = []
    for at in range(len(ids), len(ids) + more):
        held = packed.pack(range(ceil_div(at + 1, PAGE)))
        row = PlanRow(1, at, 1, held, packed.pack([token]), sample=SamplingParams(temperature=0.0))
        token = made.execute([row]).samples[0].token
        found.append(token)
    return found


def second_process(at: Minutes) -> None:
    """Pages of this process's pool written by another one, as a prefill server's GPU writes into a decode server's."""
    if not at.on_gpu:
        at.keep("cuda_ipc: needs a GPU")
        return
    context = multiprocessing.get_context("spawn")
    pool = KVPool(LLAMA_8B_KV, 512, str(at.device))
    pool.memory.zero_()
    synchronize(at.device)
    shared = CudaIpcPool(c_order(LLAMA_8B_KV, 512), device_memory(pool), CudaIpc())
    answers = context.SimpleQueue()
    child = context.Process(target=write_there, args=(shared.memory, str(at.device), answers))
    child.start()
    child.join(60)
    shared.close()
    if child.is_alive() or answers.empty():
        child.kill()
        at.keep("cuda_ipc: the other process gave no answer")
        return
    shared.revoke(SESSION, 0)
    time.sleep(TEARDOWN_S)
    written = fill(KVPool(LLAMA_8B_KV, 512, str(at.device))).memory.view(512, -1)[:128]
    arrived, free = torch.equal(pool.memory.view(512, -1)[128:256], written), shared.revoke(SESSION, 0)
    at.keep(f"cuda_ipc: {answers.get():.1f} GB/s; arrived: {arrived}; its pages are free again: {free}")


def fill(pool: KVPool) -> KVPool:
    """Random bytes, the same in each pool."""
    random = torch.Generator(pool.memory.device).manual_seed(7)
    pool.memory.random_(0, 256, generator=random)
    return pool


def write_there(memory: CudaIpcMemory, device: str, answers: Any) -> None:
    """The other process: write pages of 2,048 tokens, and say how fast."""
    pool = fill(KVPool(LLAMA_8B_KV, 512, device))
    pages = CudaIpcTransport(pool, CudaIpc()).open(SESSION, 0, LLAMA_8B_KV, PoolMemory(cuda_ipc=memory))
    source = StridedPool(LLAMA_8B_KV, c_order(LLAMA_8B_KV, 512), device_memory(pool).array())

    def write() -> None:
        pages.write_pages(range(128, 256), source, range(128))
        written = pages.flush()
        while not written.done:
            pass

    taken = min(seconds(torch.device(device), write) for _ in range(ROUNDS + 1))
    answers.put(2048 * LLAMA_8B_KV.token_bytes / taken / 1e9 if pages.close().done else 0.0)


def first_line(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


PARTS: tuple[Callable[[Minutes], None], ...] = (
    machine, correctness, handoff, pages, second_process, attention, experts, own_kernels, graphs, passes, servers,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the parts. Returns 1 if one has failed. Raises ConfigError for a device that is not there."""
    parser = make_parser("first_gpu_minutes", __doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--seconds", type=float, default=560.0, metavar="S", help="after which no part begins")
    add_threads(parser)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    at = Minutes(torch.device(resolve_device(given.device)), given.tiny, time.perf_counter() + given.seconds)
    failed = 0
    for part in PARTS:
        if time.perf_counter() > at.until:
            at.keep(f"{part.__name__}: no time is left")
            continue
        console.rule(part.__name__)
        try:
            part(at)
        except Exception as error:  # every part goes on when another has failed
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            at.keep(f"{part.__name__}: failed at {Path(where.filename).name}:{where.lineno}: {first_line(error)}")
    console.rule("in short")
    for text in at.kept:
        console.print(text, highlight=False, soft_wrap=True)
    return int(failed > 0)


if __name__ == "__main__":
    run(main)
