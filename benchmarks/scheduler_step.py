"""Time of a scheduler's step while many prompts wait: µs of a plan, by policy, and as a ratio to fcfs.

`python -m benchmarks.scheduler_step` fills the queue of one scheduler per policy with the same prompts, without stages,
and lets each of them make plans in turns. A step is one plan of --chunk tokens, its PlanDone, and a new prompt for each
one that has ended, so that as many wait at the end as at the beginning. --tight has a pool that the first prompts fill,
where most of what waits does not fit. --record measures one policy with and without the flight recorder, which writes
to a temporary folder, and prints what its forks took; --promise does so with and without promises, whose forecasts are
made beside it.
"""

import gc
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import print_table, run, spread
from headrace.core.config import SchedulerConfig
from headrace.core.config.scheduler import Policy, PromiseLevel
from headrace.core.messages.forecasts import MakeForecast
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.runtime.clock import wall_time
from headrace.core.runtime.event_loop import is_due
from headrace.core.runtime.process import collect_seldom
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.version import headrace_version
from headrace.scheduler.recording.file import Header
from headrace.scheduler.recording.hiding import Hiding
from headrace.scheduler.recording.recorder import FlightRecorder
from headrace.scheduler.recording.store import RecordingStore
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.server.launch.forecaster import Forecaster

POLICIES: tuple[Policy, ...] = ("fcfs", "srpt", "slo")
VOCABULARY = 30_000
LENGTH = 256  # of every prompt, so that a step has the same work under every policy
COST = (0.0, 5e-6, 1e-2)  # about PLAN_S a plan, measured by the stage
PLAN_S = 0.02  # in the scheduler's own time
WRITING_S = 2.0  # for which a child of the recorder lives, likewise


class Bench:
    """One scheduler with a full queue."""

    def __init__(
        self,
        policy: Policy,
        waiting: int,
        chunk: int,
        pages: int,
        folder: Path | None = None,
        promise: PromiseLevel = "off",
    ) -> None:
        """waiting: prompts in the queue. chunk: tokens of a plan. folder: of recordings; None: nothing is recorded.
        promise: with forecasts."""
        self._config = SchedulerConfig(
            policy=policy,
            chunk_tokens=chunk,
            kv_pages=pages,
            vocab_size=VOCABULARY,
            max_queued_tokens=1 << 40,
            max_queued_requests=1 << 30,
            promise=promise,
        )
        scheduler = Scheduler(self._config)
        self._forecaster = Forecaster(scheduler)
        self._recorder = None if folder is None else self._record(scheduler, folder)
        self._scheduler = self._recorder or scheduler
        self._written_at = 0.0
        self.forks_ms: list[float] = []
        self._random = random.Random(0)
        self._now = 0.0
        self._count = 0
        self.steps = 0
        """That were made so far."""

        ready = StageReady(
            stage=0,
            geometry=Geometry("float32", 1, 1, 1, 16),
            fingerprint="f",
            data_port=1,
            kv_pages=pages,
            vocab_size=VOCABULARY,
            cost=COST,
        )
        self._scheduler.handle(ready, 0.0)
        self._waiting = waiting
        for _ in range(waiting):
            self._forecast(self._submit())

    def _record(self, scheduler: Scheduler, folder: Path) -> FlightRecorder:
        header = Header(
            version=headrace_version(),
            python=platform.python_version(),
            config=self._config,
            hidden=True,
            wall_offset_s=0.0,
        )
        return FlightRecorder(
            scheduler,
            RecordingStore(folder, "bench"),
            header,
            Hiding(bytes(32), VOCABULARY, self._config.page_size),
            keep_s=300.0,
            clock=time.perf_counter,
            wall=wall_time,
            reply=lambda _reply: None,
        )

    def close(self) -> None:
        """End the recorder and the forecaster."""
        self._forecaster.close()
        if self._recorder is not None:
            self._recorder.close()

    def warm_up(self) -> None:
        """Replace every prompt that waits once: those that came first were promised nothing."""
        while self._count < 2 * self._waiting:
            self._step()

    def step(self, count: int) -> float:
        """CPU seconds of so many steps."""
        started = time.process_time()
        for _ in range(count):
            self._step()
        return time.process_time() - started

    def _step(self) -> None:
        self._now += PLAN_S
        self.steps += 1
        if self._recorder is not None:
            self._write(self._recorder)
        forward = next(each for each in self._scheduler.plan(self._now) if isinstance(each, Forward))
        samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
        done = PlanDone(stage=0, seq=forward.seq, duration_s=PLAN_S, samples=samples)
        effects = self._scheduler.handle(done, self._now)
        for made in self._forecaster.receive(self._now):
            effects += self._scheduler.handle(made, self._now)
        for effect in effects:
            if isinstance(effect, RequestFinished):
                effects += self._submit()
        self._forecast(effects)

    def _forecast(self, effects: Sequence[Effect]) -> None:
        """Fork, as the loop does when a forecast is ordered."""
        for effect in effects:
            if isinstance(effect, MakeForecast):
                began = time.perf_counter()
                self._forecaster.apply(effect, self._now)
                self.forks_ms.append(1000 * (time.perf_counter() - began))

    def _write(self, recorder: FlightRecorder) -> None:
        """As the loop does when the recorder is due. Its child lives for some of the scheduler's seconds, which pass in
        a blink here: it is waited for when they have passed."""
        if recorder.descriptors():
            while recorder.descriptors() and self._now >= self._written_at:
                time.sleep(0.01)
                recorder.work(self._now)
        elif is_due(recorder.due(), self._now):
            began = time.perf_counter()
            recorder.work(self._now)
            self.forks_ms.append(1000 * (time.perf_counter() - began))
            self._written_at = self._now + WRITING_S

    def _submit(self) -> list[Effect]:
        self._count += 1
        length = LENGTH
        prompt = pack([self._random.randrange(VOCABULARY)] * length)
        sampling, rid = SamplingParams(max_tokens=1), f"r{self._count}"
        return self._scheduler.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=Discard()), self._now)


def _measure(benches: Sequence[Bench], steps: int, rounds: int) -> list[list[float]]:
    """Microseconds of a step of each of them, by round, in turns."""
    times: list[list[float]] = [[] for _ in benches]
    for bench in benches:
        bench.warm_up()
    for _ in range(rounds):
        for bench, taken in zip(benches, times, strict=True):
            taken.append(bench.step(steps) / steps * 1e6)
    return times


def _measure_recording(waiting: int, chunk: int, pages: int, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Bench("srpt", waiting, chunk, pages)
        recorded = Bench("srpt", waiting, chunk, pages, Path(folder))
        gc.collect()
        gc.freeze()
        times = _measure([plain, recorded], steps, rounds)
        written = sum(each.stat().st_size for each in Path(folder).rglob("*"))
        recorded.close()
    medians = [statistics.median(taken) for taken in times]
    rows = [
        [name, spread(taken), f"{median / medians[0]:.3f}"]
        for name, taken, median in zip(("not recorded", "recorded"), times, medians, strict=True)
    ]
    print_table(f"scheduler step, srpt, {waiting:,} waiting", ["", "µs", "ratio of medians"], rows)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"fork: {spread(recorded.forks_ms)} ms, {len(recorded.forks_ms)} in {recorded.steps} steps, with "
        f"{resident:.0f} MiB resident; {written / 1e6:.1f} MB in the ring"
    )


def _measure_promises(waiting: int, chunk: int, pages: int, steps: int, rounds: int) -> None:
    benches = [Bench("srpt", waiting, chunk, pages), Bench("srpt", waiting, chunk, pages, promise="p99")]
    gc.collect()
    gc.freeze()
    times = _measure(benches, steps, rounds)
    benches[1].close()
    medians = [statistics.median(taken) for taken in times]
    rows = [
        [name, spread(taken), f"{median / medians[0]:.3f}"]
        for name, taken, median in zip(("no promises", "--promise p99"), times, medians, strict=True)
    ]
    print_table(f"scheduler step, srpt, {waiting:,} waiting", ["", "µs", "ratio of medians"], rows)
    print(f"fork: {spread(benches[1].forks_ms)} ms, {len(benches[1].forks_ms)} in {benches[1].steps} steps")


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = make_parser("scheduler_step", __doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 100_000], metavar="N", help="prompts that wait")
    parser.add_argument("--chunk", type=int, default=2048, metavar="TOKENS", help="tokens of a plan")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of a round")
    parser.add_argument("--tight", action="store_true", help="a pool that a few prompts fill")
    parser.add_argument("--record", action="store_true", help="the flight recorder's cost, under srpt")
    parser.add_argument("--promise", action="store_true", help="the cost of promises, under srpt")
    add_rounds(parser, 7)
    given = parser.parse_args(arguments)
    collect_seldom()  # as the scheduler's process does
    pages = 160 if given.tight else 4096
    if given.record:
        for waiting in given.waiting:
            _measure_recording(waiting, given.chunk, pages, given.steps, given.rounds)
        return 0
    if given.promise:
        for waiting in given.waiting:
            _measure_promises(waiting, given.chunk, pages, given.steps, given.rounds)
        return 0
    rows = []
    for waiting in given.waiting:
        benches = [Bench(policy, waiting, given.chunk, pages) for policy in POLICIES]
        gc.collect()
        gc.freeze()  # the prompts that wait: collecting them would be measured with every policy
        times = _measure(benches, given.steps, given.rounds)
        for policy, taken in zip(POLICIES, times, strict=True):
            ratio = min(taken) / min(times[0])  # of the fastest rounds: a busy machine only adds to them
            rows.append([f"{policy}, {waiting:,} waiting", spread(taken), f"{ratio:.2f}"])
    print_table("scheduler step", ["policy", "µs", "ratio to fcfs"], rows)
    return 0


if __name__ == "__main__":
    run(main)
