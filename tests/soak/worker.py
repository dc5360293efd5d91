"""A process of a soak: runs every n-th seed, and reports a batch once a second."""

import gc
import logging
import multiprocessing
import signal
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Literal
from unittest.mock import patch

import msgspec

from headrace.scheduler.scheduler import Scheduler
from tests.scheduler.recordings import save_recordings
from tests.soak.cases import Case, case_of, run_case, signature
from tests.soak.coverage import Recorder, Transition
from tests.soak.replays import run_recorded
from tests.soak.shrink import command, regression_test, shrink
from tests.soak.transitions import undeclared

REPORT_S = 1.0
COLLECT = 500  # schedules between two garbage collections
LONGEST_CPU_S = 120.0
"""CPU time of one schedule after which it counts as endless."""

SHRUNK = 5
"""Failures of different kinds that a process shrinks. Of the others only the seed is reported."""


class Failure(msgspec.Struct, frozen=True):
    """A schedule that broke a guarantee."""

    seed: int
    problems: tuple[str, ...]
    command: str
    """What runs it again, as simple as it could be made."""
    test: str = ""
    """Code of a regression test; empty if the schedule was not shrunk."""
    runs: int = 0
    """Schedules that shrinking took."""
    recordings: tuple[str, ...] = ()
    """Files for headrace replay, of each of its schedulers."""


class Batch(msgspec.Struct, frozen=True):
    """What a process has done since its last report."""

    process: int
    schedules: int
    outcomes: Counter[str]
    seen: Counter[Transition]
    arrivals: Counter[tuple[str, str]]
    replays: Counter[str]
    failures: tuple[Failure, ...]
    next_seed: int
    """All seeds of this process below it were run."""
    cpu_s: float
    """CPU time of the process so far."""
    over: bool = False
    """It is the last one."""


What = Literal["transitions", "replays", "schedules"]
"""What is found out of schedules, beside whether they keep their guarantees."""

ENDLESS = "EndlessSchedule"


class EndlessSchedule(Exception):
    """A schedule has used LONGEST_CPU_S."""


def work(process: int, seeds: range, what: What, reports: "Queue[Batch]", stop: Event) -> None:
    """Run these seeds until they are through or stop is set."""
    signal.signal(signal.SIGVTALRM, _endless)
    logging.disable()  # peers that schedules have refused, thousands of them
    gc.collect()
    gc.freeze()
    gc.disable()
    worker = _Worker(process, reports, what == "replays")
    context: AbstractContextManager[object] = nullcontext()
    if what == "transitions":
        context = worker.recorder.installed()
    elif what == "replays":  # which decide the same without it; schedules without recordings are for guarantees
        context = patch.object(Scheduler, "check_integrity", lambda _scheduler: [])
    with context:
        worker.run(seeds, stop)


def examine(case: Case, seed: int, problems: list[str], shrinks: bool) -> Failure:
    """Make a failure of what a schedule has broken."""
    if not shrinks:
        return Failure(seed, tuple(problems[:3]), command(case), recordings=_recorded(case))
    simple = shrink(case, problems[0])
    test = regression_test(simple.case, simple.problem)
    shown = (*problems[:3], f"simplest: {simple.problem}")
    return Failure(seed, shown, command(simple.case), test, simple.runs, _recorded(simple.case))


def _recorded(case: Case) -> tuple[str, ...]:
    """Run it once more, and record the schedulers that it has."""
    return tuple(map(str, save_recordings(partial(run_case, case), f"soak-{case.seed}")))


class _Worker:
    def __init__(self, process: int, reports: "Queue[Batch]", replays: bool) -> None:
        self._replays_them = replays
        self._recorder = self.recorder = Recorder()
        self._process = process
        self._reports = reports
        self._kinds: set[str] = set()
        self._undeclared: set[Transition] = set()
        self._reset()

    def run(self, seeds: range, stop: Event) -> None:
        parent = multiprocessing.parent_process()
        due = time.monotonic() + REPORT_S
        seed = seeds.start
        for index, seed in enumerate(seeds):
            if stop.is_set():
                break
            self._one(seed)
            if index % COLLECT == 0:  # _schedules starts again with each report
                gc.collect()
            if time.monotonic() >= due:
                self._report(seed + seeds.step)
                due = time.monotonic() + REPORT_S
                if parent is not None and not parent.is_alive():
                    break
        else:
            seed = seeds.stop
        self._report(seed, over=True)

    def _one(self, seed: int) -> None:
        case = case_of(seed, 0.0) if self._replays_them else case_of(seed)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_S)
        result = run_recorded(case) if self._replays_them else run_case(case)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._schedules += 1
        self._outcomes.update(result.outcomes)
        self._replays.update(result.replays)
        problems = result.problems
        if result.recordings:
            again = f"{command(case)} --recorded"
            self._failures.append(Failure(seed, tuple(problems), again, recordings=result.recordings))
        elif problems:
            kind = signature(problems[0])
            shrinks = kind not in self._kinds and len(self._kinds) < SHRUNK and ENDLESS not in problems[0]
            self._kinds.add(kind)
            with self._recorder.paused():
                self._failures.append(examine(case, seed, problems, shrinks))
        elif wrong := undeclared(self._recorder.seen) - self._undeclared:
            self._undeclared |= wrong
            texts = tuple(f"undeclared transition: {' / '.join(each)}" for each in sorted(wrong))
            self._failures.append(Failure(seed, texts, command(case)))

    def _report(self, next_seed: int, over: bool = False) -> None:
        recorder = self._recorder
        self._reports.put(
            Batch(
                self._process,
                self._schedules,
                self._outcomes,
                Counter(recorder.seen),
                Counter(recorder.arrivals),
                self._replays,
                tuple(self._failures),
                next_seed,
                time.process_time(),
                over,
            )
        )
        recorder.seen.clear()
        recorder.arrivals.clear()
        self._reset()

    def _reset(self) -> None:
        self._schedules = 0
        self._outcomes: Counter[str] = Counter()
        self._replays: Counter[str] = Counter()
        self._failures: list[Failure] = []


def _endless(_signal: int, _frame: FrameType | None) -> None:
    raise EndlessSchedule(f"one schedule has used {LONGEST_CPU_S:g} s of CPU time")
