"""Judges silence by what the silent process could have done in that time, which /proc tells. Time is an argument.

    heard() ──► asked() ──► look(activity) ──► look(activity) ──► … hung
                          every interval is charged to the process, or excused by what it did or was kept from:

    stopped (SIGSTOP, debugger, freezer) │ in a disk wait │ computing │ runnable without a core │ idle
    ─────────────────────────────── excused ──────────────────────────────────────────────────── charged

A process hangs when more than silence_s was charged to it, or when it was not heard for hang_s, whatever the excuse.
The time during which the judge itself did not run is not silence: core/runtime/clock.py (LoopClock), or excuse().
"""

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

NANOSECONDS = 1e-9
STOPPED = frozenset("Tt")  # by a signal, by a debugger


class Activity(NamedTuple):
    """What the kernel says of a process, summed over its threads."""

    cpu_s: float
    """CPU time used so far."""
    delay_s: float
    """Time so far in which threads could have run, and had no core."""
    stopped: bool = False
    """By SIGSTOP, a terminal, a debugger or the freezer of its cgroup."""
    runnable: bool = False
    """A thread runs, or waits for a core."""
    disk: bool = False
    """A thread is in an uninterruptible wait: for a disk, swap, a network file system."""


class Cause(Enum):
    """Why a process did not answer."""

    IDLE = "idle"  # it could have answered
    STOPPED = "stopped"
    COMPUTING = "computing"
    OVERLOADED = "overloaded"  # the machine
    DISK = "disk"
    UNKNOWN = "unknown"  # it is on another machine, or /proc does not say


CHARGED = (Cause.IDLE, Cause.UNKNOWN)


class Limits(NamedTuple):
    """Bounds of a silence, in seconds."""

    silence_s: float
    """Time in which the process could have answered."""
    hang_s: float
    """Time in all, excused or not."""


class Finding(NamedTuple):
    """What is known of a silence."""

    silent_s: float
    """Time since the process was heard."""
    charged_s: float
    """Part of it in which the process could have answered."""
    cause: Cause
    """What most of the silence is due to; STOPPED if the process is stopped now."""
    cause_s: float
    """Time that is due to it."""
    hung: bool
    """A limit is exceeded: the process counts as dead."""

    @property
    def text(self) -> str:
        """What to say of the process, behind its name."""
        match self.cause:
            case Cause.STOPPED:
                return f"is stopped (SIGSTOP) for {self.cause_s:.1f} s"
            case Cause.COMPUTING:
                return f"has been silent for {self.silent_s:.1f} s: computing for {self.cause_s:.1f} s"
            case Cause.OVERLOADED:
                share = 100 * self.cause_s / self.silent_s if self.silent_s else 0.0
                return f"has been silent for {self.silent_s:.1f} s: the machine is overloaded, run delay {share:.0f} %"
            case Cause.DISK:
                return f"has been silent for {self.silent_s:.1f} s: it waits for a disk or for swap"
        return f"has been silent for {self.silent_s:.1f} s"


class Silence:
    """The silence of one process since it was last heard."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.asking = False
        """It was asked something, and has not been heard since."""
        self._limits = limits
        self._heard = now
        self._looked = now
        self._last: Activity | None = None
        self._due_to: dict[Cause, float] = {}

    @property
    def heard_at(self) -> float:
        """When the process was last heard, moved by the time that was excused."""
        return self._heard

    def heard(self, now: float) -> None:
        """The process has said something: the silence is over."""
        self._heard = self._looked = now
        self.asking = False
        self._last = None
        self._due_to.clear()

    def asked(self, now: float) -> None:
        """The process was sent something that it answers. A silence without a question is charged only to a process of
        which nothing else is known."""
        if not self.asking:
            self.asking = True
            self._looked = now

    def excuse(self, seconds: float, now: float) -> None:
        """The judge itself did not run for so long, and heard nothing."""
        self._heard = min(now, self._heard + seconds)
        self._looked = min(now, self._looked + seconds)

    def look(self, now: float, activity: Activity | None) -> Finding:
        """Take in what the process does now, and judge. activity: None if that cannot be known."""
        passed = max(0.0, now - self._looked)
        for cause, seconds in _explain(passed, self._last, activity):
            self._due_to[cause] = self._due_to.get(cause, 0.0) + seconds
        self._looked, self._last = now, activity
        silent = max(0.0, now - self._heard)
        charged = silent if activity is None else sum(self._due_to.get(cause, 0.0) for cause in CHARGED)
        cause = max(self._due_to, key=lambda each: self._due_to[each])
        if activity is None or activity.stopped:
            cause = Cause.UNKNOWN if activity is None else Cause.STOPPED
        hung = charged > self._limits.silence_s or silent > self._limits.hang_s
        return Finding(silent, charged, cause, self._due_to.get(cause, 0.0), hung)


def _explain(passed: float, before: Activity | None, after: Activity | None) -> list[tuple[Cause, float]]:
    """What an interval of `passed` seconds was spent with, as far as its two ends tell."""
    if after is None:
        return [(Cause.UNKNOWN, passed)]
    if after.stopped or (before is not None and before.stopped):
        return [(Cause.STOPPED, passed)]
    if before is None:
        before = Activity(after.cpu_s, after.delay_s)
    if after.disk:
        return [(Cause.DISK, passed)]
    computed = min(passed, max(0.0, after.cpu_s - before.cpu_s))
    delayed = min(passed - computed, max(0.0, after.delay_s - before.delay_s))
    rest = passed - computed - delayed
    # The kernel adds a delay up only when it is over: a thread that is runnable without having run is in one.
    waits = after.runnable
    return [
        (Cause.COMPUTING, computed),
        (Cause.OVERLOADED, delayed + (rest if waits else 0.0)),
        (Cause.IDLE, 0.0 if waits else rest),
    ]


def read_activity(pid: int) -> Activity | None:
    """What a process does, over all its threads; None if it has ended, or /proc does not say."""
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = os.listdir(folder)
    except OSError:
        return None
    states: list[str] = []
    cpu_s = delay_s = 0.0
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):  # the thread has ended meanwhile
            # 1 (name, which may have parentheses) S …
            states.append((folder / thread / "stat").read_text().rpartition(")")[2].split()[0])
            used, waited = (folder / thread / "schedstat").read_text().split()[:2]
            cpu_s += int(used) * NANOSECONDS
            delay_s += int(waited) * NANOSECONDS
    if not states or states[0] in "ZX":
        return None
    return Activity(
        cpu_s, delay_s, stopped=states[0] in STOPPED or _frozen(pid), runnable="R" in states, disk="D" in states
    )


def _frozen(pid: int) -> bool:
    """Whether the freezer of its cgroup (version 2) has stopped a process: docker pause, a suspended container."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                events = Path(f"/sys/fs/cgroup{line[3:]}/cgroup.events").read_text()
                return "frozen 1" in events.splitlines()
    return False
