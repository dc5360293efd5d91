"""Exchange of tokens between experts of two replicas, beside a memory copy, and its share of a layer's time.

`python -m benchmarks.exchange`. Two processes of one thread, with half of the experts of a random Qwen3-MoE each,
compute passes of as many tokens in each replica, joined by Gloo. alone: the collective operations of a layer with
nothing computed between them, also as a share of the time of a whole layer, attention included. copy: as many bytes
copied in memory. blocked: share of the layer that a process waits in these operations, for the slower one included.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.arguments import add_lengths, add_rounds, make_parser
from benchmarks.profile import MAX_TOKENS, PAGE, rows_of
from benchmarks.random_moe import VOCABULARY, add_sizes, save_moe
from benchmarks.ranks import TIMEOUT_S, Rank, Ranks
from benchmarks.report import console, print_table, prompt, run
from benchmarks.timed_collectives import TimedCollectives
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.runtime.process import keep_freed_memory
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine.collectives.operations import ALONE
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.layers.exchange import make_exchange
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.expert_plan import Way
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.runner import ModelRunner

WAYS: tuple[Way, ...] = ("allgather", "alltoall")
REPLICAS = 2


class Timing(NamedTuple):
    """Of one pass of one rank, in seconds."""

    whole: float
    blocked: float
    """Of it in collective operations."""
    alone: float
    """The same operations with nothing between them."""
    copy: float
    """Their bytes copied in memory."""
    bytes: int


def replica(rank: Rank, model: str, moe: MoeSpec) -> Callable[[tuple[Way, int, int]], Timing]:
    """In a process: computes a pass of so many tokens, given as (way, tokens, seed)."""
    group = TimedCollectives(TorchCollectives(make_group(range(rank.size), TIMEOUT_S)))
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(MAX_TOKENS, PAGE), threads=rank.threads)
    config = ModelConfig(model=model, dtype="float32", device="cpu")
    exchanges = {way: make_exchange(way, moe, ALONE, group, group) for way in WAYS}
    runners = {
        way: ModelRunner(plan_rank(config, engine, MAX_TOKENS, experts=len(each.own)), exchanges=[each])
        for way, each in exchanges.items()
    }
    keep_freed_memory()

    def compute(order: tuple[Way, int, int]) -> Timing:
        way, tokens, seed = order
        [row] = rows_of(prompt(tokens, seed * rank.size + rank.number, VOCABULARY), tokens)
        group.all_reduce(torch.zeros(1)).wait()  # so that both begin at once
        group.clear()
        started = time.perf_counter()
        runners[way].forward([row], None, Agreement((tokens,) * rank.size, tokens))
        whole, blocked = time.perf_counter() - started, group.seconds
        sizes = [each.bytes for each in group.operations]
        return Timing(whole, blocked, group.repeat(), copy_seconds(sizes), sum(sizes))

    return compute


def copy_seconds(sizes: Sequence[int]) -> float:
    """Seconds of copying so many bytes, one size after the other, between buffers that are there."""
    source, target = torch.zeros(2, max(sizes), dtype=torch.uint8)
    started = time.perf_counter()
    for size in sizes:
        target[:size].copy_(source[:size])
    return time.perf_counter() - started


def measure(ranks: Ranks, way: Way, tokens: int, layers: int, rounds: int) -> tuple[str, ...]:
    """A row of the table, after a pass to warm up."""
    passes: list[list[Timing]] = [ranks.ask((way, tokens, seed)) for seed in range(rounds + 1)][1:]
    slowest = [max(of_pass, key=lambda timing: timing.alone) for of_pass in passes]
    alone, copy = (statistics.median(times) for times in zip(*((t.alone, t.copy) for t in slowest), strict=True))
    share = statistics.median(max(timing.blocked / timing.whole for timing in of_pass) for of_pass in passes)
    least = statistics.median(max(timing.alone for timing in each) / max(t.whole for t in each) for each in passes)
    megabytes = statistics.median(timing.bytes for timing in slowest) / layers / 1e6
    return (
        way, f"{tokens:,}", f"{megabytes:.2f}", f"{alone / layers * 1e3:.2f}", f"{copy / layers * 1e3:.2f}",
        f"{alone / copy:.1f}", f"{least:.3f}", f"{share:.3f}",
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("exchange", __doc__)
    add_sizes(parser)
    add_lengths(parser, 16, 512)
    add_rounds(parser, 5)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, console.status("making a model") as status:
        spec, moe = save_moe(Path(folder), given)
        status.update("starting")
        with Ranks(REPLICAS, replica, folder, moe) as ranks:
            rows = []
            for tokens in given.lengths:
                for way in WAYS:
                    status.update(f"{way}, {tokens} tokens")
                    rows.append(measure(ranks, way, tokens, spec.layers, given.rounds))
    print_table(
        f"{given.experts} experts of which a token takes {given.top_k}, hidden size {given.hidden}, float32, two "
        f"replicas; per layer and replica, medians of {given.rounds} rounds",
        ("way", "tokens", "MB", "alone, ms", "copy, ms", "/ copy", "/ layer", "blocked"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
