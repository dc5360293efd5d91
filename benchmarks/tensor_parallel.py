"""Tensor parallelism on the CPU: tokens/s of shards with one thread each beside one process with as many threads.

`python -m benchmarks.tensor_parallel`. The shards are processes that sum over Gloo, as those of a server on one machine
do; both sides take turns, prompt by prompt, on the same cores. Also the share of a forward pass that the shards are
blocked in collective operations, waiting for the slower one included.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but typed here only

from benchmarks.arguments import add_lengths, add_model, add_rounds, make_parser
from benchmarks.profile import MAX_TOKENS, PAGE, rows_of
from benchmarks.report import console, print_table, prompt, run, spread
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.geometry import ceil_div
from headrace.engine.collectives.base import Pending
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.runner import ModelRunner
from headrace.server.launch.free_port import free_port

TIMEOUT_S = 120.0


class Setup(NamedTuple):
    """What a process is told."""

    model: str
    dtype: str
    chunk: int  # tokens
    port: int  # of the rendezvous
    size: int  # shards
    rank: int
    threads: int


class Timing(NamedTuple):
    """Of one prompt."""

    seconds: float
    blocked: float  # in collective operations


class _Timed(NamedTuple):
    """A Pending whose wait is timed."""

    pending: Pending
    timed: Callable[[Callable[[], Tensor]], Tensor]

    def wait(self) -> Tensor:
        """See Pending."""
        return self.timed(self.pending.wait)


class TimedCollectives(TorchCollectives):
    """Collectives that sum the time that calls and waits take."""

    seconds = 0.0

    def all_reduce(self, x: Tensor) -> _Timed:  # type: ignore[override]  # any Pending will do
        """See Collectives."""
        started = time.perf_counter()
        pending = super().all_reduce(x)
        self.seconds += time.perf_counter() - started
        return _Timed(pending, self._timed)

    def gather(self, x: Tensor, destination: int) -> _Timed:  # type: ignore[override]
        """See Collectives."""
        started = time.perf_counter()
        pending = super().gather(x, destination)
        self.seconds += time.perf_counter() - started
        return _Timed(pending, self._timed)

    def _timed(self, wait: Callable[[], Tensor]) -> Tensor:
        started = time.perf_counter()
        result = wait()
        self.seconds += time.perf_counter() - started
        return result


def serve(setup: Setup, orders: Connection) -> None:
    """Compute the prompts that arrive as lists of ids; answer with a Timing each. None ends the process."""
    torch.set_num_threads(setup.threads)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", setup.port, setup.size, is_master=setup.rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=timeout)
    group = TimedCollectives(make_group(range(setup.size), TIMEOUT_S))
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(MAX_TOKENS, PAGE), threads=setup.threads)
    model = ModelConfig(model=setup.model, dtype=setup.dtype, device="cpu")  # type: ignore[arg-type]  # one of DTYPES
    runner = ModelRunner(model, engine, MAX_TOKENS, tp=group)
    keep_freed_memory()
    runner.warm_up()
    orders.send(None)  # ready
    while (ids := orders.recv()) is not None:
        group.seconds, started = 0.0, time.perf_counter()
        for row in rows_of(ids, setup.chunk):
            runner.execute([row])
        orders.send(Timing(time.perf_counter() - started, group.seconds))
    dist.destroy_process_group()


class Side:
    """The processes of one side of the comparison. A context manager, which ends them."""

    def __init__(self, model: str, dtype: str, chunk: int, shards: int, threads: int) -> None:
        """Start them and wait until they are ready. threads: of each."""
        spawn = multiprocessing.get_context("spawn")
        port = free_port()
        self._ends = []
        self._processes = []
        for rank in range(shards):
            end, other = spawn.Pipe()
            setup = Setup(model, dtype, chunk, port, shards, rank, threads)
            process = spawn.Process(target=serve, args=(setup, other), daemon=True)
            process.start()
            other.close()  # so that a process that ends is noticed
            self._ends.append(end)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def prefill(self, ids: list[int]) -> Timing:
        """Compute a prompt: seconds of the slowest process, and the longest that one was blocked."""
        for end in self._ends:
            end.send(ids)
        timings: list[Timing] = [end.recv() for end in self._ends]
        return Timing(max(each.seconds for each in timings), max(each.blocked for each in timings))

    def __enter__(self) -> "Side":
        """The side itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def measure(sharded: Side, whole: Side, length: int, rounds: int) -> tuple[str, ...]:
    """A row of the table: the sides in turns, after a prompt each to warm up."""
    found: list[tuple[Timing, Timing]] = []
    for seed in range(rounds + 1):
        ids = prompt(length, seed)
        first, second = (sharded, whole) if seed % 2 else (whole, sharded)
        one, other = first.prefill(ids), second.prefill(ids)
        found.append((one, other) if seed % 2 else (other, one))
    own, alone = (list(side) for side in zip(*found[1:], strict=True))
    rates, other_rates = ([length / each.seconds for each in side] for side in (own, alone))
    ratio = statistics.median(mine / other for mine, other in zip(rates, other_rates, strict=True))
    blocked = statistics.median(each.blocked / each.seconds for each in own)
    return f"{length:,}", spread(rates), spread(other_rates), f"{ratio:.2f}", f"{blocked:.1%}"


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model or a number of shards that it cannot be split over."""
    parser = make_parser("tensor_parallel", __doc__)
    add_model(parser)
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="shards, of one thread each")
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="TOKENS", help="tokens of a chunk")
    add_lengths(parser, 16, 128, 512, 2048)
    add_rounds(parser, 5)
    given = parser.parse_args(arguments)
    with ExitStack() as stack, console.status("starting") as status:
        sharded = stack.enter_context(Side(given.model, given.dtype, given.chunk_tokens, given.tp, threads=1))
        whole = stack.enter_context(Side(given.model, given.dtype, given.chunk_tokens, 1, threads=given.tp))
        rows = []
        for length in given.lengths:
            status.update(f"{length} tokens")
            rows.append(measure(sharded, whole, length, given.rounds))
    print_table(
        f"{given.model}, {given.dtype}: {given.tp} shards of one thread beside one process of {given.tp}; median "
        f"(range) of {given.rounds} rounds",
        ("tokens", "tokens/s, shards", "tokens/s, one process", "ratio", "blocked in collectives"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
