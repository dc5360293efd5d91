"""A soak: random schedules in several processes until the time, or the number of schedules, is up.

parent ──seeds──► process 0: first, first + n, first + 2n …
  ▲   ──seeds──► process 1: first + 1 …
  └────── batches: schedules, outcomes, transitions, failures ── each second
"""

import multiprocessing
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.coverage import Transition
from tests.soak.transitions import DECLARED
from tests.soak.worker import Batch, Failure, What, work

FOREVER = 1 << 60
PROGRESS_S = 10.0
PATIENCE_S = 300.0
"""Time that a process has to finish its schedule, or to shrink a failure, when all is over."""


@dataclass(slots=True)
class Summary:
    """What a soak has done so far."""

    first_seed: int
    processes: int
    what: What
    schedules: int = 0
    seconds: float = 0.0
    cpu_s: dict[int, float] = field(default_factory=dict)
    """By process."""

    next_seeds: dict[int, int] = field(default_factory=dict)
    """By process: its seeds below this one were run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seen: Counter[Transition] = field(default_factory=Counter)
    arrivals: Counter[tuple[str, str]] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Processes that ended without a last report."""

    interrupted: bool = False

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of one core for a schedule."""
        return 1000 * sum(self.cpu_s.values()) / max(1, self.schedules)

    @property
    def clean(self) -> bool:
        """Nothing was broken."""
        return not self.failures and not self.lost

    def take(self, batch: Batch) -> None:
        """Add what a process reports."""
        self.schedules += batch.schedules
        self.outcomes.update(batch.outcomes)
        self.seen.update(batch.seen)
        self.arrivals.update(batch.arrivals)
        self.replays.update(batch.replays)
        self.failures.extend(batch.failures)
        self.cpu_s[batch.process] = batch.cpu_s
        self.next_seeds[batch.process] = batch.next_seed

    def progress(self) -> str:
        """One line."""
        covered = f"{sum(transition in self.seen for transition in DECLARED)} of {len(DECLARED)} transitions"
        if self.what == "replays":
            covered = ", ".join(f"{count} {name}" for name, count in self.replays.items())
        rate = self.schedules / max(1e-9, self.seconds)
        return (
            f"{self.seconds:.0f} s: {self.schedules} schedules, {rate:.0f}/s, {self.cpu_ms:.2f} ms of CPU each, "
            f"{covered}, {len(self.failures)} failures"
        )


def soak(
    seconds: float,
    processes: int,
    first_seed: int,
    schedules: int | None = None,
    *,
    what: What = "transitions",
    progress: Callable[[str], None] | None = None,
    failed: Callable[[Failure], None] | None = None,
) -> Summary:
    """Run schedules. schedules: stop after so many. progress, failed: take lines and failures as they come. Stops
    cleanly at SIGINT and SIGTERM."""
    summary = Summary(first_seed, processes, what)
    context = multiprocessing.get_context("spawn")
    reports: multiprocessing.queues.Queue[Batch] = context.Queue()
    stop = context.Event()
    end = FOREVER if schedules is None else first_seed + schedules
    workers = [
        context.Process(target=work, args=(index, range(first_seed + index, end, processes), what, reports, stop))
        for index in range(processes)
    ]
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # which the processes inherit: stop ends them
    for worker in workers:
        worker.start()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    started = time.monotonic()
    shown, running = started, set(range(processes))
    deadline = started + seconds
    while running:
        try:
            now = time.monotonic()
            if now >= deadline:
                stop.set()
            summary.seconds = now - started
            if progress is not None and now - shown >= PROGRESS_S:
                shown = now
                progress(summary.progress())
            _drain(reports, summary, running, failed)
            for index in [index for index in running if not workers[index].is_alive() and reports.empty()]:
                _drain(reports, summary, running, failed)
                if index in running:
                    running.discard(index)
                    after = summary.next_seeds.get(index, first_seed + index)
                    summary.lost.append(f"process {index} ended with {workers[index].exitcode} after seed {after}")
            if now >= deadline + PATIENCE_S:
                break
        except KeyboardInterrupt:
            if summary.interrupted:
                break
            summary.interrupted = True
            stop.set()
            print("stopping; once more to stop at once", file=sys.stderr)
    for worker in workers:
        worker.join(0.0 if running else 10.0)
        if worker.is_alive():
            summary.lost.append(f"process {workers.index(worker)} did not stop")
            worker.kill()
    summary.seconds = time.monotonic() - started
    return summary


def _drain(
    reports: "multiprocessing.queues.Queue[Batch]",
    summary: Summary,
    running: set[int],
    failed: Callable[[Failure], None] | None,
) -> None:
    """Take in what has been reported; waits a little for the first of it."""
    try:
        batch = reports.get(timeout=0.2)
    except queue.Empty:
        return
    summary.take(batch)
    for failure in batch.failures if failed is not None else ():
        failed(failure)  # type: ignore[misc]
    if batch.over:
        running.discard(batch.process)
