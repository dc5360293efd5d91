"""Tensor parallelism on the CPU: tokens/s of shards with one thread each beside one process with as many threads.

`python -m benchmarks.tensor_parallel`. The shards are processes that sum through shared memory, as those of a server on
one machine do, and others over Gloo; all sides take turns, prompt by prompt, on the same cores. Also the share of a
forward pass that the shards are blocked in collective operations, waiting for the slower one included.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.arguments import add_lengths, add_model, add_rounds, make_parser
from benchmarks.profile import MAX_TOKENS, PAGE, rows_of
from benchmarks.ranks import TIMEOUT_S, Rank, Ranks
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.timed_collectives import TimedCollectives
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.collectives.shared_memory import on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner

WAYS = ("shared memory", "Gloo")


class Timing(NamedTuple):
    """Seconds of one prompt on one process."""

    seconds: float
    blocked: float  # in collective operations


def shard(rank: Rank, model: str, dtype: str, chunk: int, shared: bool) -> Callable[[list[int]], Timing]:
    """In a process: computes prompts in chunks of so many tokens. shared: sums go through shared memory, not over
    Gloo."""
    over_gloo = TorchCollectives(make_group(range(rank.size), TIMEOUT_S))
    group = TimedCollectives(on_one_machine(over_gloo, TIMEOUT_S) if shared else over_gloo)
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(MAX_TOKENS, PAGE), threads=rank.threads)
    config = ModelConfig(model=model, dtype=dtype, device="cpu")  # type: ignore[arg-type]  # one of DTYPES
    runner = ModelRunner(plan_rank(config, engine, MAX_TOKENS, tp=group.size, shard=group.rank), tp=group)
    keep_freed_memory()
    runner.warm_up()

    def compute(ids: list[int]) -> Timing:
        group.clear()
        started = time.perf_counter()
        for row in rows_of(ids, chunk):
            runner.execute([row])
        return Timing(time.perf_counter() - started, group.seconds)

    return compute


def prefill(side: Ranks, ids: list[int]) -> Timing:
    """Compute a prompt: seconds of the slowest process, and the longest that one was blocked."""
    timings: list[Timing] = side.ask(ids)
    return Timing(max(each.seconds for each in timings), max(each.blocked for each in timings))


def measure(sides: Sequence[Ranks], length: int, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: shards by each of WAYS beside one process, the last side. They take turns, after a prompt each
    to warm up."""
    found: list[list[Timing]] = []
    for seed in range(rounds + 1):
        ids = prompt(length, seed)
        order = range(len(sides)) if seed % 2 else range(len(sides) - 1, -1, -1)
        timings = {number: prefill(sides[number], ids) for number in order}
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
        setup = (given.model, given.dtype, given.chunk_tokens)
        sides = [
            stack.enter_context(Ranks(given.tp, shard, *setup, True)),
            stack.enter_context(Ranks(given.tp, shard, *setup, False)),
            stack.enter_context(Ranks(1, shard, *setup, False, threads=given.tp)),
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
