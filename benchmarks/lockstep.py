"""Passes/s of lockstep replicas that are all busy, beside one replica and beside as many that share nothing.

`python -m benchmarks.lockstep`. The scheduler of servers plans for stub models whose passes take a set time (they sleep)
in threads of this process. Lockstep replicas wait for each other in every pass, as in the exchange between experts. The
sides take turns; passes are counted per replica.
"""

import itertools
import queue
import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.degrees import ratio
from benchmarks.replica_step import forwards, started
from benchmarks.report import console, print_table, run, spread
from headrace.core.config import EngineConfig, ModelConfig, SchedulerConfig
from headrace.core.messages.frontend import RequestFinished, Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.stage_events import PlanDone
from headrace.core.types.packed import pack
from headrace.core.types.request import Discard, SamplingParams
from headrace.engine.stub_runner import StubRunner

TOKENS = 64  # of a prompt, and of a replica in a pass
VOCABULARY = 300
WAITING = 8  # prompts of each replica
KV_PAGES = 512
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass
class Replica:
    """A stub model in a thread of its own."""

    number: int
    pass_ms: int
    barrier: threading.Barrier
    """Where all replicas meet in a pass."""
    done: "queue.SimpleQueue[PlanDone]"
    orders: "queue.SimpleQueue[Forward | None]" = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        """Compute passes until None comes."""
        name = f"stub:layers=1,vocab={VOCABULARY},us_per_token=0,us_per_plan={1000 * self.pass_ms}"
        engine = EngineConfig(page_size=16, kv_pages=KV_PAGES)
        runner = StubRunner(ModelConfig(model=name, device="cpu", dtype="float32", max_model_len=TOKENS), engine)
        while (order := self.orders.get()) is not None:
            began = time.perf_counter()
            self.barrier.wait()
            samples = runner.execute(order.rows).samples if order.rows else ()
            seconds = time.perf_counter() - began
            self.done.put(PlanDone(stage=self.number, seq=order.seq, duration_s=seconds, samples=tuple(samples)))


class Server:
    """A scheduler and its replicas. A context manager, which ends them."""

    def __init__(self, dp: int, pass_ms: int, *, lockstep: bool) -> None:
        """Start the replicas, with prompts in their queues."""
        self._rids = itertools.count()
        self._random = random.Random(0)
        self._scheduler = started(
            SchedulerConfig(
                dp=dp, lockstep=lockstep, chunk_tokens=TOKENS, kv_pages=KV_PAGES, prefix_cache=False,
                max_queued_tokens=1 << 40, max_queued_requests=1 << 30,
            )
        )  # fmt: skip
        self._done: queue.SimpleQueue[PlanDone] = queue.SimpleQueue()
        meeting = threading.Barrier(dp) if lockstep else None
        self._replicas = [
            Replica(number, pass_ms, meeting or threading.Barrier(1), self._done) for number in range(dp)
        ]
        for replica in self._replicas:
            threading.Thread(target=replica.run, daemon=True).start()
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
        return done / len(self._replicas) / (time.perf_counter() - began)

    def _plan(self) -> int:
        """Order passes while there are credits; returns how many, each replica's counted."""
        count = 0
        while found := forwards(self._scheduler.plan(time.perf_counter())):
            for replica, order in found:
                self._replicas[replica].orders.put(order)
            count += len(found)
        return count

    def _take(self) -> int:
        """Wait for a pass, or until the next one may be ordered. Returns how many passes are done."""
        due = self._scheduler.next_deadline()
        try:
            event = self._done.get(timeout=None if due is None else max(0.0, due - time.perf_counter()))
        except queue.Empty:
            self._scheduler.tick(time.perf_counter())
            return 0
        for effect in self._scheduler.handle(event, time.perf_counter()):
            if isinstance(effect, RequestFinished):
                self._submit()
        return 1

    def _submit(self) -> None:
        prompt = pack([self._random.randrange(VOCABULARY) for _ in range(TOKENS)])
        rid = str(next(self._rids))
        self._scheduler.handle(Submit(rid=rid, prompt=prompt, sampling=ONE_TOKEN, route=Discard()), time.perf_counter())

    def __enter__(self) -> "Server":
        """The server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads."""
        for replica in self._replicas:
            replica.orders.put(None)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("lockstep", __doc__)
    parser.add_argument("--dp", type=int, default=8, metavar="N", help="replicas")
    parser.add_argument("--pass-ms", type=int, default=50, metavar="MS", help="what a forward pass takes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each side in a round")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        sides = {
            "one replica": stack.enter_context(Server(1, given.pass_ms, lockstep=False)),
            "free-running": stack.enter_context(Server(given.dp, given.pass_ms, lockstep=False)),
            "lockstep": stack.enter_context(Server(given.dp, given.pass_ms, lockstep=True)),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        with console.status("measuring"):
            for number in range(given.rounds + 1):
                for name, server in sides.items():
                    rate = server.passes(given.seconds if number else 0.0)  # the first round warms up
                    rates[name] += [rate] if number else []
    rows = [(name, spread(found), ratio(rates["lockstep"], found)) for name, found in rates.items()]
    print_table(
        f"{given.dp} replicas, passes of {given.pass_ms} ms: passes/s of a replica, median (range) of {given.rounds} rounds",
        ("", "passes/s", "lockstep / this"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
