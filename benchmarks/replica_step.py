"""Time of the scheduler for a pass of lockstep replicas: planning, reports and encoding, beside one replica.

`python -m benchmarks.replica_step` fills the queues of a scheduler with prompts, and measures turns: one pass of all
replicas, its orders encoded, and a report of each replica. A new prompt comes for each that has ended, which is not
measured. bind: choosing the
replica of a prompt of --long tokens, whose prefix one replica has cached.
"""

import random
import statistics
import time
from collections.abc import Sequence

import msgspec

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import print_table, run
from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import Forward, Order, ReplicaOrder
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.scheduler.scheduler import Effect, Scheduler

PASS_S = 0.05  # of a pass, in the scheduler's own time
VOCABULARY = 30_000


def started(config: SchedulerConfig) -> Scheduler:
    """A scheduler whose ranks are ready."""
    scheduler = Scheduler(config)
    geometry = Geometry("float32", 1, 1, 1, config.page_size)
    for rank in config.layout.ranks:
        ready = StageReady(
            stage=rank, geometry=geometry, fingerprint="f", data_port=1, kv_pages=config.kv_pages, vocab_size=VOCABULARY
        )
        scheduler.handle(ready, 0.0)
    return scheduler


class Bench:
    """One scheduler with full queues."""

    def __init__(self, dp: int, waiting: int, chunk: int, length: int) -> None:
        """waiting: prompts of each replica in the queue. length: tokens of each."""
        config = SchedulerConfig(
            dp=dp,
            lockstep=True,
            chunk_tokens=chunk,
            kv_pages=100_000,
            pipeline_depth=0,
            max_queued_tokens=1 << 40,
            max_queued_requests=1 << 30,
        )
        self._dp = dp
        self._length = length
        self._scheduler = started(config)
        self._encoder = msgspec.msgpack.Encoder()
        self._random = random.Random(0)
        self._now = 0.0
        self._count = 0
        for _ in range(waiting * dp):
            self._submit(self._length)

    def turn(self) -> float:
        """Seconds of one pass."""
        began = time.perf_counter()
        self._now += PASS_S
        effects = self._scheduler.plan(self._now)
        self._encode(effects)
        ended = 0
        for replica, forward in forwards(effects):
            samples = tuple(SampledToken(row.request, 5) for row in forward.rows if row.sample is not None)
            done = PlanDone(stage=replica, seq=forward.seq, duration_s=PASS_S, samples=samples)
            effects = self._scheduler.handle(done, self._now)
            self._encode(effects)
            ended += sum(isinstance(effect, RequestFinished) for effect in effects)
        seconds = time.perf_counter() - began
        for _ in range(ended):
            self._submit(self._length)
        return seconds

    def bind(self, tokens: int) -> float:
        """Seconds of admitting a prompt of so many tokens, which is taken back at once."""
        prompt = self._prompt(tokens)
        began = time.perf_counter()
        rid = self._submit(0, prompt)
        seconds = time.perf_counter() - began
        self._scheduler.handle(Abort(rid=rid), self._now)
        return seconds

    def _prompt(self, tokens: int) -> bytes:
        return pack([self._random.randrange(VOCABULARY) for _ in range(tokens)])

    def _submit(self, tokens: int, prompt: bytes = b"") -> str:
        self._count += 1
        rid, sampling = str(self._count), SamplingParams(max_tokens=1)
        submit = Submit(rid=rid, prompt=prompt or self._prompt(tokens), sampling=sampling, route=Discard())
        self._scheduler.handle(submit, self._now)
        return rid

    def _encode(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                self._encoder.encode(effect.order if isinstance(effect, ReplicaOrder) else effect)


def forwards(effects: Sequence[Effect]) -> list[tuple[int, Forward]]:
    """The passes among effects, each with its replica."""
    found = []
    for effect in effects:
        order = effect.order if isinstance(effect, ReplicaOrder) else effect
        if isinstance(order, Forward):
            found.append((effect.replica if isinstance(effect, ReplicaOrder) else 0, order))
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure each number of replicas in turns."""
    parser = make_parser("replica_step", __doc__)
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 8], metavar="N", help="replicas")
    parser.add_argument("--waiting", type=int, default=100, metavar="N", help="prompts in the queue of each replica")
    parser.add_argument("--length", type=int, default=256, metavar="TOKENS", help="of each prompt")
    parser.add_argument("--long", type=int, default=100_000, metavar="TOKENS", help="of the prompt that is bound")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens of a replica in a pass")
    add_rounds(parser, 200)
    given = parser.parse_args(arguments)
    benches = [Bench(dp, given.waiting, given.chunk_tokens, given.length) for dp in given.dp]
    turns: list[list[float]] = [[] for _ in benches]
    binds: list[list[float]] = [[] for _ in benches]
    for number in range(given.rounds):
        for bench, seconds, bound in zip(benches, turns, binds, strict=True):
            seconds.append(bench.turn())
            if number % 20 == 0:
                bound.append(bench.bind(given.long))
    base, rows = statistics.median(turns[0]), []
    for dp, seconds, bound in zip(given.dp, turns, binds, strict=True):
        middle = statistics.median(seconds)
        cells = (
            f"{middle * 1e3:.2f}",
            f"{middle / base:.1f}",
            f"{middle / PASS_S:.3f}",
            f"{statistics.median(bound) * 1e3:.2f}",
        )
        rows.append((f"dp {dp}", *cells))
    columns = ("", "pass (ms)", "beside the first", f"share of {PASS_S * 1e3:.0f} ms", "bind (ms)")
    print_table("scheduler, lockstep replicas", columns, rows)
    return 0


if __name__ == "__main__":
    run(main)
