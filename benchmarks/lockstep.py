"""Passes/s of lockstep replicas that are all busy, beside one replica and beside as many that share nothing.

`python -m benchmarks.lockstep`. The scheduler of servers plans for processes with a stub model each, whose passes take
a set time (they sleep). Lockstep replicas meet in one all-reduce over Gloo in every pass, as they do in the exchange
between experts. The sides take turns on the same processes; passes are counted per replica.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.degrees import ratio
from benchmarks.ranks import TIMEOUT_S, Rank, Ranks
from benchmarks.replica_step import forwards, started
from benchmarks.report import console, print_table, run, spread
from headrace.core.config import EngineConfig, ModelConfig, SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.load_plan import plan_rank
from headrace.engine.stub.runner import StubRunner

TOKENS = 64  # of a prompt, and of a replica in a pass
VOCABULARY = 300
WAITING = 8  # prompts of each replica
KV_PAGES = 512
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


class Pass(NamedTuple):
    """One pass of one replica."""

    order: Forward
    lockstep: bool


def replica(rank: Rank, pass_ms: int) -> Callable[[Pass], PlanDone]:
    """In a process: computes passes of a stub model."""
    group = TorchCollectives(make_group(range(rank.size), TIMEOUT_S))
    model = f"stub:layers=1,vocab={VOCABULARY},us_per_token=0,us_per_plan={1000 * pass_ms}"
    engine = EngineConfig(page_size=16, kv_pages=KV_PAGES)
    config = ModelConfig(model=model, device="cpu", dtype="float32", max_model_len=TOKENS)
    runner = StubRunner(plan_rank(config, engine))

    def compute(given: Pass) -> PlanDone:
        began = time.perf_counter()
        if given.lockstep:
            group.all_reduce(torch.zeros(1)).wait()
        samples = tuple(runner.execute(given.order.rows).samples)
        return PlanDone(stage=rank.number, seq=given.order.seq, duration_s=time.perf_counter() - began, samples=samples)

    return compute


class Server:
    """A scheduler whose replicas are the first of these processes."""

    def __init__(self, ranks: Ranks, dp: int, *, lockstep: bool) -> None:
        """With prompts in the queues."""
        self._ranks = ranks
        self._dp = dp
        self._lockstep = lockstep
        self._rids = itertools.count()
        self._random = random.Random(0)
        self._scheduler = started(
            SchedulerConfig(
                dp=dp, lockstep=lockstep, chunk_tokens=TOKENS, kv_pages=KV_PAGES, prefix_cache=False,
                max_queued_tokens=1 << 40, max_queued_requests=1 << 30,
            )
        )  # fmt: skip
        for _ in range(WAITING * dp):
            self._submit()

    def passes(self, seconds: float) -> float:
        """Passes/s of each replica over this time, and until those under way are done."""
        began = time.perf_counter()
        under_way, done = self._plan(), 0
        while under_way:
            count = self._take()
            done, under_way = done + count, under_way - count
            if time.perf_counter() - began < seconds:
                under_way += self._plan()
        return done / self._dp / (time.perf_counter() - began)

    def _plan(self) -> int:
        """Order passes while there are credits; returns how many, each replica's counted."""
        count = 0
        while found := forwards(self._scheduler.plan(time.perf_counter())):
            for number, order in found:
                self._ranks.post(number, Pass(order, self._lockstep))
            count += len(found)
        return count

    def _take(self) -> int:
        """Wait for passes, or until the next one may be ordered. Returns how many are done."""
        due = self._scheduler.next_deadline()
        done = self._ranks.done(None if due is None else max(0.0, due - time.perf_counter()))
        if not done:
            self._scheduler.tick(time.perf_counter())
        for event in done:
            for effect in self._scheduler.handle(event, time.perf_counter()):
                if isinstance(effect, RequestFinished):
                    self._submit()
        return len(done)

    def _submit(self) -> None:
        prompt = pack([self._random.randrange(VOCABULARY) for _ in range(TOKENS)])
        rid = str(next(self._rids))
        self._scheduler.handle(Submit(rid=rid, prompt=prompt, sampling=ONE_TOKEN, route=Discard()), time.perf_counter())


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("lockstep", __doc__)
    parser.add_argument("--dp", type=int, default=8, metavar="N", help="replicas")
    parser.add_argument("--pass-ms", type=int, default=50, metavar="MS", help="what a forward pass takes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each side in a round")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    with console.status("starting") as status, Ranks(given.dp, replica, given.pass_ms) as ranks:
        sides = {
            "one replica": Server(ranks, 1, lockstep=False),
            "free-running": Server(ranks, given.dp, lockstep=False),
            "lockstep": Server(ranks, given.dp, lockstep=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        status.update("measuring")
        for number in range(given.rounds + 1):
            for name, server in sides.items():
                rate = server.passes(given.seconds if number else 0.0)  # the first round warms up
                rates[name] += [rate] if number else []
    rows = [(name, spread(found), ratio(rates["lockstep"], found)) for name, found in rates.items()]
    print_table(
        f"{given.dp} replicas, passes of {given.pass_ms} ms: passes/s of a replica, median (range) of "
        f"{given.rounds} rounds",
        ("", "passes/s", "lockstep / this"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
