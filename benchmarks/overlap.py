"""Dual-batch overlap with the stub model: time of a forward pass beside the longer of computing and exchanging.

`python -m benchmarks.overlap`. Two replicas that share experts, a process each, exchange rows over Gloo. Computing and
travelling are set times that burn nothing, so that two cores are enough to show what is hidden: a pass that is not cut
takes their sum, one in two halves little more than the longer of them. Cut and whole passes take turns.
"""

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but typed here only

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import console, print_table, run
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.ranks.coordinate import Rules, coordinate, vote
from headrace.core.types.ranks.layout import Layout
from headrace.engine.layers.exchange import make_exchange
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.expert_plan import Way
from headrace.engine.model.stub import parse_stub
from headrace.engine.parallel.groups import Making, leave_groups, make_groups
from headrace.engine.stub.runner import StubRunner
from headrace.server.launch.free_port import free_port

LAYOUT = Layout(dp=2)
PAGE = 16
TIMEOUT_S = 120.0
WAYS: tuple[Way, ...] = ("allgather", "alltoall")


class Setup(NamedTuple):
    """What a process is told."""

    model: str
    way: Way
    tokens: int  # of each replica in a pass
    port: int  # of the rendezvous
    rank: int


def serve(setup: Setup, orders: Connection) -> None:
    """Compute a pass for each bool that arrives, True: in halves; answer with its seconds. None ends the process."""
    torch.set_num_threads(1)
    timeout, size = timedelta(seconds=TIMEOUT_S), len(LAYOUT.ranks)
    store = TCPStore("127.0.0.1", setup.port, size, is_master=setup.rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=size, timeout=timeout)
    groups = make_groups(LAYOUT, setup.rank, Making(TIMEOUT_S), experts=True, overlap=True)
    moe = parse_stub(setup.model).spec().moe
    assert moe is not None
    exchanges = (
        make_exchange(setup.way, moe, groups.tp, groups.dp, groups.ep),
        make_exchange(setup.way, moe, groups.tp, groups.second_dp, groups.second_ep),
    )
    pages = ceil_div(setup.tokens, PAGE)
    model = ModelConfig(model=setup.model, dtype="float32", device="cpu")
    runner = StubRunner(plan_rank(model, EngineConfig(page_size=PAGE, kv_pages=pages)), exchanges=exchanges)
    runner.warm_up()
    rows = [PlanRow(1, 0, setup.tokens, pack(range(pages)), pack([index % 250 for index in range(setup.tokens)]))]
    orders.send(None)  # ready
    while (halved := orders.recv()) is not None:
        rules = Rules(pad="max" if setup.way == "allgather" else "none", cut=halved, cut_prefill=2)
        agreed = coordinate([vote([setup.tokens], rules)] * LAYOUT.dp, rules)
        assert agreed is not None
        started = time.perf_counter()
        runner.forward(rows, None, agreed)
        orders.send(time.perf_counter() - started)
    leave_groups()


class Stage:
    """The processes of both replicas. A context manager, which ends them."""

    def __init__(self, model: str, way: Way, tokens: int) -> None:
        """Start them and wait until they are ready."""
        spawn = multiprocessing.get_context("spawn")
        port = free_port()
        self._ends = []
        self._processes = []
        for rank in LAYOUT.ranks:
            end, other = spawn.Pipe()
            process = spawn.Process(target=serve, args=(Setup(model, way, tokens, port, rank), other), daemon=True)
            process.start()
            other.close()  # so that a process that ends is noticed
            self._ends.append(end)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def compute(self, *, halved: bool) -> float:
        """Seconds of a pass, of the slower replica."""
        for end in self._ends:
            end.send(halved)
        seconds: list[float] = [end.recv() for end in self._ends]
        return max(seconds)

    def __enter__(self) -> "Stage":
        """The processes themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("overlap", __doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of each replica in a pass")
    parser.add_argument("--layers", type=int, default=8, help="each with an exchange there and back")
    parser.add_argument(
        "--us-per-token", type=int, default=1000, metavar="US", help="computing, in all layers together"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="exchanging over computing")
    add_rounds(parser, 5)
    given = parser.parse_args(arguments)
    rows = []
    with console.status("starting") as status:
        for way in WAYS:
            for ratio in given.ratios:
                exchange_us = round(given.us_per_token * ratio)
                model = (
                    f"stub:layers={given.layers},hidden=16,experts=8,top_k=2,max_len={given.tokens},"
                    f"us_per_token={given.us_per_token},us_per_exchange={exchange_us}"
                )
                status.update(f"{way}, exchanging / computing {ratio}")
                longer_s = max(given.us_per_token, exchange_us) * given.tokens * 1e-6
                with ExitStack() as stack:
                    stage = stack.enter_context(Stage(model, way, given.tokens))
                    pairs = [(stage.compute(halved=False), stage.compute(halved=True)) for _ in range(given.rounds + 1)]
                whole, halved = (statistics.median(side) / longer_s for side in zip(*pairs[1:], strict=True))
                rows.append((way, f"{ratio:g}", f"{longer_s * 1e3:.0f}", f"{whole:.2f}", f"{halved:.2f}"))
    print_table(
        f"stub, {given.tokens} tokens a replica, {given.layers} layers; time of a pass over the longer of computing "
        f"and exchanging, median of {given.rounds} rounds",
        ("", "exchanging / computing", "longer (ms)", "whole", "in halves"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
