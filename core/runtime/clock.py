"""Time as a value: loops read a Clock and pass the seconds on, so everything else can run under a virtual one."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


def wall_offset() -> float:
    """Seconds by which the time of day is ahead of this machine's monotonic clock."""
    return time.time() - time.monotonic()


class VirtualClock:
    """A clock that tests and the simulator move by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds
