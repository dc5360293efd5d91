"""A stage of a pipeline of processes, which passes hidden states on over Gloo: `python -m … PORT STAGES RANK`.

It fails when it keeps more of them than plans are in flight, or when its memory grows by what it sends.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.torch_collectives import make_group
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.runner import HiddenSpec
from tests.engine.parallel.test_pipeline_links import plan, sampled, taken
from tests.usage import usage

TIMEOUT_S = 60.0
CREDITS = 4
PLANS = 300
WARM_UP = 50  # plans
ROWS, WIDTH = 64, 4096  # 1 MiB in float32
GROWN_MIB = 32.0  # of PLANS - WARM_UP


class Kept:
    """The hidden states of this rank that are in memory."""

    def __init__(self) -> None:
        self._known: list[StorageWeakRef] = []

    def add(self, hidden: torch.Tensor) -> None:
        self._known.append(StorageWeakRef(hidden.untyped_storage()))

    def count(self) -> int:
        self._known = [each for each in self._known if not each.expired()]
        return len(self._known)


def main() -> None:
    port, stages, rank = map(int, sys.argv[1:])
    with gloo_world(port, stages, rank):
        group = make_group(range(stages), TIMEOUT_S)
        spec = HiddenSpec(WIDTH, torch.float32, torch.device("cpu"))
        links = PipelineLinks(Layout(stages, 1, 1), rank, spec, group, CREDITS)
        kept, begun = Kept(), usage(os.getpid())
        for number in range(1, PLANS + 1):
            _pass(links, number, kept)
            assert kept.count() <= CREDITS, f"plan {number}: {kept.count()} hidden states are in memory"
            if number == WARM_UP:
                begun = usage(os.getpid())
        grown = usage(os.getpid()).anonymous_mib - begun.anonymous_mib
        assert grown < GROWN_MIB, f"{PLANS - WARM_UP} plans have left {grown:.0f} MiB"
        dist.barrier()


def _pass(links: PipelineLinks, number: int, kept: Kept) -> None:
    """One plan on this rank. The first stage takes the token of the plan that has to be done before."""
    each = plan(number, number, count=ROWS)
    if links.first and (done := number - CREDITS) > 0:
        assert taken(links, done) == [(done, done)]
    links.post_receive(each)
    received = links.receive(each)
    hidden = torch.full((ROWS, WIDTH), float(number)) if received is None else received + 1
    if not links.last:
        kept.add(hidden)
        links.send(each, hidden)
    links.broadcast(each, sampled((number, number)) if links.last else None)


@contextmanager
def gloo_world(port: int, size: int, rank: int) -> Iterator[None]:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
