"""Hidden states between two stages of two shards each: whole from shard to shard, beside slices and an all-gather.

`python -m benchmarks.hidden_states`. Four processes joined by Gloo. whole: each shard sends all hidden states to the
shard of its number, as servers do. slices: each sends its part of the rows, and the receivers gather them. The time is
that of the slower receiver, from the moment at which all four are ready.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.arguments import add_lengths, add_rounds, make_parser
from benchmarks.ranks import TIMEOUT_S, Rank, Ranks
from benchmarks.report import console, print_table, run, spread
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group

SHARDS = 2


class Order(NamedTuple):
    """One passage."""

    tokens: int
    hidden: int
    sliced: bool


def rank(own: Rank) -> Callable[[Order], float]:
    """In a process: sends to the next stage, or receives; returns the seconds that it took."""
    stage, shard = divmod(own.number, SHARDS)
    groups = [make_group(range(first, first + SHARDS), TIMEOUT_S) for first in (0, SHARDS)]
    tp = TorchCollectives(groups[stage])

    def passage(order: Order) -> float:
        rows = order.tokens // SHARDS if order.sliced else order.tokens
        whole = torch.zeros(order.tokens, order.hidden)
        mine = whole[shard * rows : (shard + 1) * rows] if order.sliced else whole
        received = torch.empty(rows, order.hidden)
        dist.barrier()
        started = time.perf_counter()
        if stage == 0:
            dist.send(mine, own.number + SHARDS)
        else:
            dist.recv(received, own.number - SHARDS)
            if order.sliced:
                tp.all_gather(received).wait()
        return time.perf_counter() - started

    return passage


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("hidden_states", __doc__)
    parser.add_argument("--hidden", type=int, default=4096, metavar="N", help="hidden size, float32")
    add_lengths(parser, 16, 512, 2048)
    add_rounds(parser, 20)
    given = parser.parse_args(arguments)
    rows = []
    with console.status("starting") as status, Ranks(2 * SHARDS, rank) as ranks:
        for tokens in given.lengths:
            status.update(f"{tokens} tokens")
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(given.rounds + 1):
                for sliced in (False, True):
                    seconds = ranks.ask(Order(tokens, given.hidden, sliced))
                    times[sliced].append(1e3 * max(seconds[SHARDS:]))
            whole, slices = (each[1:] for each in times)
            ratio = statistics.median(one / other for one, other in zip(slices, whole, strict=True))
            rows.append((f"{tokens:,}", spread(whole), spread(slices), f"{ratio:.2f}"))
    print_table(
        f"hidden size {given.hidden}, float32: ms from two shards to two, median (range) of {given.rounds} rounds",
        ("tokens", "whole", "slices, all-gather", "slices / whole"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
