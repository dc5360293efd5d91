"""Cost of the agreement of servers with a scheduler each that share experts (--dp-external).

`python -m benchmarks.agreement`. Ranks are processes that vote over Gloo, as those of servers on one machine do. A pass
is a sleep, so that it takes no core. Added time: what a pass takes longer with the vote than without it, when the vote
is posted after the pass before (the plan comes late), and when it is posted before that one is computed (the plan is
there). Alone: the time of an agreement when all ranks come at once, and nothing is between. Idle: the CPU time of a
rank, and of all of them, while no rank has a plan: 200 votes a second.
"""

import multiprocessing
import queue
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but typed here only

from benchmarks.arguments import make_parser
from benchmarks.report import print_table, run
from headrace.core.messages.orders import AnyOrder, Forward, PlanRow, ShutdownStage
from headrace.core.types.ranks.coordinate import Rules, Vote
from headrace.engine.agreement import BUSY_TICKS, LONG_TICK_S, VotedPasses, agree
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.server.launch.free_port import free_port

TIMEOUT_S = 60.0
TOKENS = 512  # of each plan


class Setup(NamedTuple):
    """What a process is told."""

    port: int  # of the rendezvous
    size: int  # ranks
    rank: int
    passes: int
    pass_s: float
    idle_s: float


class Costs(NamedTuple):
    """Seconds of one rank."""

    bare: list[float]  # of passes without agreement
    late: list[float]  # of passes whose vote is posted after the one before
    ahead: list[float]  # of passes whose vote is posted before the one before
    alone: list[float]  # of agreements without a pass
    vote: float  # CPU time of a vote without a token
    idle: float  # CPU time per second of an idle group


def measure(setup: Setup, answers: Connection) -> None:
    """Measure at one rank, and send its Costs."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", setup.port, setup.size, is_master=setup.rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=timeout)
    group = TorchCollectives(make_group(range(setup.size), TIMEOUT_S))
    agree(Vote(0, 0, False), group, Rules())  # makes connections
    bare = [_pass(setup.pass_s) for _ in range(setup.passes)]
    late, ahead, alone = _passes(setup, group, 1), _passes(setup, group, 2), _alone(setup, group)
    costs = Costs(bare, late, ahead, alone, *_idle(setup, group))
    answers.send(costs)
    dist.destroy_process_group()


def _pass(seconds: float) -> float:
    started = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - started


def _passes(setup: Setup, group: TorchCollectives, queued_ahead: int) -> list[float]:
    """Seconds from pass to pass. queued_ahead: plans in the queue when a pass begins, its own included."""
    orders: deque[AnyOrder] = deque()
    passes = VotedPasses(group, Rules())
    times: list[float] = []
    row = PlanRow(0, 0, TOKENS, b"")
    left = list(range(1, 1 + setup.passes))
    before = 0.0
    while len(times) < setup.passes:
        while left and len(orders) < queued_ahead:
            orders.append(Forward(seq=left.pop(0), rows=(row,)))
        passes.next(orders, _no_wait)
        began = time.perf_counter()
        if before:
            times.append(began - before)
        before = began
        time.sleep(setup.pass_s)
        if not left and not orders:
            break
    agree(Vote(0, 0, False), group, Rules())  # all are here
    return times


def _no_wait(_timeout_s: float | None) -> None:
    """Plans are there."""


def _alone(setup: Setup, group: TorchCollectives) -> list[float]:
    times = []
    for _ in range(setup.passes):
        started = time.perf_counter()
        agree(Vote(TOKENS, TOKENS, False), group, Rules())
        times.append(time.perf_counter() - started)
    return times


def _idle(setup: Setup, group: TorchCollectives) -> tuple[float, float]:
    """CPU seconds of a rank that has had no plan for a second, with Gloo's: per vote, and per second."""
    inbox: queue.Queue[AnyOrder] = queue.Queue()
    orders: deque[AnyOrder] = deque()
    votes = int(setup.idle_s / LONG_TICK_S)  # the same number at all ranks
    looks: list[tuple[float, float]] = []

    def idle(timeout_s: float | None) -> None:
        with suppress(queue.Empty):
            orders.append(inbox.get(timeout=timeout_s))
        looks.append((time.perf_counter(), time.process_time()))
        if len(looks) > BUSY_TICKS + votes:
            orders.append(ShutdownStage(seq=0))

    VotedPasses(group, Rules()).next(orders, idle)
    (began, before), (ended, after) = looks[BUSY_TICKS], looks[-1]
    return (after - before) / votes, (after - before) / (ended - began)


def measure_all(size: int, passes: int, pass_s: float, idle_s: float) -> list[Costs]:
    """The costs at every rank of a group."""
    spawn = multiprocessing.get_context("spawn")
    port, ends, processes = free_port(), [], []
    for rank in range(size):
        end, other = spawn.Pipe()
        setup = Setup(port, size, rank, passes, pass_s, idle_s)
        process = spawn.Process(target=measure, args=(setup, other), daemon=True)
        process.start()
        other.close()
        ends.append(end)
        processes.append(process)
    costs: list[Costs] = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return costs


def main(arguments: Sequence[str]) -> int:
    """Measure one group."""
    parser = make_parser("agreement", __doc__)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="servers of the group")
    parser.add_argument("--passes", type=int, default=100, metavar="N", help="of each kind")
    parser.add_argument("--pass-ms", type=float, default=50.0, metavar="MS", help="of a pass")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="without a plan")
    given = parser.parse_args(arguments)
    pass_s = given.pass_ms / 1e3
    costs = measure_all(given.ranks, given.passes, pass_s, given.idle)
    bare = statistics.median(each for cost in costs for each in cost.bare)
    rows = []
    for name, times in (
        ("vote after the pass before", [each for cost in costs for each in cost.late]),
        ("vote during the pass before", [each for cost in costs for each in cost.ahead]),
    ):
        added = statistics.median(times) - bare
        rows.append((name, f"{added * 1e3:.3f}", f"{added / pass_s:.4f}"))
    alone = statistics.median(each for cost in costs for each in cost.alone)
    rows.append(("agreement alone", f"{alone * 1e3:.3f}", f"{alone / pass_s:.4f}"))
    print_table(f"{given.ranks} ranks", ("", "ms", f"share of {given.pass_ms:g} ms"), rows)
    shares, votes = [cost.idle for cost in costs], [cost.vote * 1e6 for cost in costs]
    idle = [
        ("a rank", f"{statistics.median(votes):.0f}", f"{statistics.median(shares):.3f}"),
        ("all ranks", f"{sum(votes):.0f}", f"{sum(shares):.3f}"),
    ]
    print_table("idle group", ("", "CPU of a vote (µs)", "cores"), idle)
    return 0


if __name__ == "__main__":
    run(main)
