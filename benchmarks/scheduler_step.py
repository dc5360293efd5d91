"""Time of a scheduler's step while many prompts wait: µs of a plan, by policy, and as a ratio to fcfs.

`python -m benchmarks.scheduler_step` fills the queue of one scheduler per policy with the same prompts, without stages,
and lets each of them make plans in turns. A step is one plan of --chunk tokens, its PlanDone, and a new prompt for each
one that has ended, so that as many wait at the end as at the beginning. --tight has a pool that the first prompts fill,
where most of what waits does not fit.
"""

import gc
import random
import time
from collections.abc import Sequence

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import print_table, run, spread
from headrace.core.config import SchedulerConfig
from headrace.core.config.scheduler import Policy
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.scheduler.scheduler import Scheduler

POLICIES: tuple[Policy, ...] = ("fcfs", "srpt", "slo")
VOCABULARY = 30_000
LENGTH = 256  # of every prompt, so that a step has the same work under every policy
PLAN_S = 0.02  # in the scheduler's own time


class Bench:
    """One scheduler with a full queue."""

    def __init__(self, policy: Policy, waiting: int, chunk: int, pages: int) -> None:
        """waiting: prompts in the queue. chunk: tokens of a plan."""
        self._scheduler = Scheduler(
            SchedulerConfig(
                policy=policy,
                chunk_tokens=chunk,
                kv_pages=pages,
                max_queued_tokens=1 << 40,
                max_queued_requests=1 << 30,
            )
        )
        self._random = random.Random(0)
        self._now = 0.0
        self._count = 0
        ready = StageReady(
            stage=0,
            geometry=Geometry("float32", 1, 1, 1, 16),
            fingerprint="f",
            data_port=1,
            kv_pages=pages,
            vocab_size=VOCABULARY,
        )
        self._scheduler.handle(ready, 0.0)
        for _ in range(waiting):
            self._submit()

    def step(self, count: int) -> float:
        """CPU seconds of so many steps."""
        started = time.process_time()
        for _ in range(count):
            self._step()
        return time.process_time() - started

    def _step(self) -> None:
        self._now += PLAN_S
        forward = next(each for each in self._scheduler.plan(self._now) if isinstance(each, Forward))
        samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
        done = PlanDone(stage=0, seq=forward.seq, duration_s=PLAN_S, samples=samples)
        for effect in self._scheduler.handle(done, self._now):
            if isinstance(effect, RequestFinished):
                self._submit()

    def _submit(self) -> None:
        self._count += 1
        length = LENGTH
        prompt = pack([self._random.randrange(VOCABULARY)] * length)
        sampling, rid = SamplingParams(max_tokens=1), f"r{self._count}"
        self._scheduler.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=Discard()), self._now)


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = make_parser("scheduler_step", __doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 100_000], metavar="N", help="prompts that wait")
    parser.add_argument("--chunk", type=int, default=2048, metavar="TOKENS", help="tokens of a plan")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of a round")
    parser.add_argument("--tight", action="store_true", help="a pool that a few prompts fill")
    add_rounds(parser, 7)
    given = parser.parse_args(arguments)
    pages = 160 if given.tight else 4096
    rows = []
    for waiting in given.waiting:
        benches = [Bench(policy, waiting, given.chunk, pages) for policy in POLICIES]
        gc.collect()
        gc.freeze()  # the prompts that wait: collecting them would be measured with every policy
        times: list[list[float]] = [[] for _ in benches]
        for number in range(given.rounds + 1):
            for bench, taken in zip(benches, times, strict=True):
                seconds = bench.step(given.steps)
                if number:  # the first round warms up
                    taken.append(seconds / given.steps * 1e6)
        for policy, taken in zip(POLICIES, times, strict=True):
            ratio = min(taken) / min(times[0])  # of the fastest rounds: a busy machine only adds to them
            rows.append([f"{policy}, {waiting:,} waiting", spread(taken), f"{ratio:.2f}"])
    print_table("scheduler step", ["policy", "µs", "ratio to fcfs"], rows)
    return 0


if __name__ == "__main__":
    run(main)
