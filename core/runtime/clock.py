"""Clocks. Only loops read one and pass the time on as an argument, so everything else can run in virtual time."""

import time
from typing import Protocol

TOLERANCE_S = 0.25  # longer than a loop is normally kept from running, or busy with one event


class Clock(Protocol):
    """Source of the current time."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """time.monotonic()."""
        return time.monotonic()


class LoopClock:
    """Monotonic time in which the process ran its loop: the clock of a loop that judges the silence of others.

    A process that was stopped, frozen, swapped out or left without a core for long has not listened in that time, so
    that it is not silence of another process. Such a pause advances this clock by TOLERANCE_S at most; what has arrived
    meanwhile is read before any deadline is reached. Used by one thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self._waits_s = 0.0
        self.paused_s = 0.0
        """Seconds of pauses so far: what this clock is behind the other one."""

    def wait(self, seconds: float) -> None:
        """The loop is about to wait for its sockets for so long: that is no pause."""
        self._waits_s = max(0.0, seconds)

    def now(self) -> float:
        """Seconds, without the pauses since the first call."""
        now = self._clock.now()
        passed, self._last = now - self._last, now
        if passed > self._waits_s + TOLERANCE_S:
            self.paused_s += passed - TOLERANCE_S
        self._waits_s = 0.0
        return now - self.paused_s


def wall_time() -> float:
    """Seconds since the epoch, for people and other machines to read. It jumps when the clock is set: no deadline and
    no silence is measured by it."""
    return time.time()  # noqa: TID251


def wall_offset() -> float:
    """Seconds since the epoch minus this machine's monotonic clock."""
    return wall_time() - time.monotonic()


class VirtualClock:
    """A clock that tests and the simulator advance."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds, as advanced so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward. Raises ValueError for negative seconds."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds
