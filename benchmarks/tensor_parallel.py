"""Tensor parallelism on the CPU: tokens/s of shards with one thread each beside one process with as many threads.

`python -m benchmarks.tensor_parallel`. The shards are processes that sum through shared memory, as those of a server on
one machine do, and others over Gloo; all sides take turns, prompt by prompt, on the same cores. Also the share of a
forward pass that the shards are blocked in collective operations, waiting for the slower one included.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

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
from headrace.engine.collectives.base import Collectives, Pending
from headrace.engine.collectives.shared_memory import on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.runner import ModelRunner
from headrace.server.launch.free_port import free_port

T = TypeVar("T")
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
    shared: bool  # sums go through shared memory, not over Gloo


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


class TimedCollectives:
    """Collectives that sum the time that calls and waits take."""

    def __init__(self, group: Collectives) -> None:
        self.size, self.rank = group.size, group.rank
        self.seconds = 0.0
        self._group = group

    def all_reduce(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.all_reduce(x))

    def all_gather(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.all_gather(x))

    def reduce_scatter(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.reduce_scatter(x))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.all_to_all(x, sent, received))

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.broadcast(x, source))

    def gather(self, x: Tensor, destination: int) -> Pending:
        """See Collectives."""
        return self._begun(lambda: self._group.gather(x, destination))

    def _begun(self, begin: Callable[[], Pending]) -> Pending:
        return _Timed(self._timed(begin), self._timed)

    def _timed(self, step: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = step()
        self.seconds += time.perf_counter() - started
        return result


def serve(setup: Setup, orders: Connection) -> None:
    """Compute the prompts that arrive as lists of ids; answer with a Timing each. None ends the process."""
    torch.set_num_threads(setup.threads)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", setup.port, setup.size, is_master=setup.rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=timeout)
    over_gloo = TorchCollectives(make_group(range(setup.size), TIMEOUT_S))
    group = TimedCollectives(on_one_machine(over_gloo, TIMEOUT_S) if setup.shared else over_gloo)
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

    def __init__(self, model: str, dtype: str, chunk: int, shards: int, threads: int, *, shared: bool) -> None:
        """Start them and wait until they are ready. threads: of each. shared: see Setup."""
        spawn = multiprocessing.get_context("spawn")
        port = free_port()
        self._ends = []
        self._processes = []
        for rank in range(shards):
            end, other = spawn.Pipe()
            setup = Setup(model, dtype, chunk, port, shards, rank, threads, shared)
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


WAYS = ("shared memory", "Gloo")


def measure(sides: Sequence[Side], length: int, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: shards by each of WAYS beside one process, the last side. They take turns, after a prompt each
    to warm up."""
    found: list[list[Timing]] = []
    for seed in range(rounds + 1):
        ids = prompt(length, seed)
        order = range(len(sides)) if seed % 2 else range(len(sides) - 1, -1, -1)
        timings = {number: sides[number].prefill(ids) for number in order}
        found.append([timings[number] for number in range(len(sides))])
    *shards, whole = zip(*found[1:], strict=True)
    rows: list[tuple[str, ...]] = []
    for way, side in zip(WAYS, shards, strict=True):
        rates, other_rates = ([length / each.seconds for each in timings] for timings in (side, whole))
        ratio = statistics.median(mine / other for mine, other in zip(rates, other_rates, strict=True))
        blocked = statistics.median(each.blocked / each.seconds for each in side)
        rows.append((f"{length:,}", way, spread(rates), spread(other_rates), f"{ratio:.2f}", f"{blocked:.1%}"))
    return rows


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
        start = partial(Side, given.model, given.dtype, given.chunk_tokens)
        sides = [
            stack.enter_context(start(given.tp, threads=1, shared=True)),
            stack.enter_context(start(given.tp, threads=1, shared=False)),
            stack.enter_context(start(1, threads=given.tp, shared=False)),
        ]
        rows: list[tuple[str, ...]] = []
        for length in given.lengths:
            status.update(f"{length} tokens")
            rows += measure(sides, length, given.rounds)
    print_table(
        f"{given.model}, {given.dtype}: {given.tp} shards of one thread beside one process of {given.tp}; median "
        f"(range) of {given.rounds} rounds",
        ("tokens", "sums by", "tokens/s, shards", "tokens/s, one process", "ratio", "blocked in collectives"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
