"""A stage of a pipeline of processes, whose tensors go as they are and through host memory: `python -m … PORT STAGES
RANK [DIES]`.

It compares what comes with what was sent, to the bit. With DIES the second stage is killed in the middle, and every
other one has to find its links broken.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.collectives.torch_collectives import make_group
from headrace.engine.parallel.carriers import DirectCarrier, StagedCarrier
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.runner import HiddenSpec
from tests.engine.parallel.gloo_rank import gloo_world
from tests.engine.parallel.test_pipeline_links import plan, sampled, taken

TIMEOUT_S = 60.0
CREDITS = 4
PLANS = 20
ROWS, WIDTH = 5, 33
DYING = 1  # the rank that ends
CPU = torch.device("cpu")


def links(layout: Layout, rank: int, *, staged: bool) -> PipelineLinks:
    group = make_group(layout.ranks, TIMEOUT_S, name="tokens")
    carrier = StagedCarrier(CPU) if staged else DirectCarrier(CPU)
    return PipelineLinks(layout, rank, HiddenSpec(WIDTH, torch.bfloat16, CPU), group, CREDITS, carrier)


def expected(number: int, stage: int) -> torch.Tensor:
    """What comes to a stage: each before it has added 1."""
    hidden = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
    for _ in range(stage):
        hidden = hidden + 1
    return hidden


def run(each: PipelineLinks, seq: int, number: int, stage: int) -> None:
    """One plan."""
    turn = plan(seq, number, count=ROWS)
    if each.first and (done := number - CREDITS) > 0:
        assert taken(each, done) == [(done, 7 * done)]
    each.post_receive(turn)
    received = each.receive(turn)
    assert received is None or torch.equal(received, expected(number, stage)), f"plan {number}"
    if stage == DYING and len(sys.argv) > 4 and number == PLANS // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if not each.last:
        each.send(turn, expected(number, stage + 1))
    each.broadcast(turn, sampled((number, 7 * number)) if each.last else None)


def main() -> None:
    port, stages, rank = map(int, sys.argv[1:4])
    layout = Layout(stages, 1, 1)
    with gloo_world(port, stages, rank):
        both = [links(layout, rank, staged=staged) for staged in (True, False)]
        try:
            for number in range(1, PLANS + 1):
                for which, each in enumerate(both):
                    run(each, 2 * number + which, number, rank)
        except LinkBroken as error:
            print(f"broken: {error}", flush=True)
            os._exit(0)  # leaving a broken group may take its timeout
        dist.barrier()


if __name__ == "__main__":
    main()
