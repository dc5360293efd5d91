"""Clocks. Only loops read one and pass the time on as an argument, so everything else can run in virtual time."""

import time
from typing import Protocol


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


def wall_offset() -> float:
    """Seconds since the epoch minus this machine's monotonic clock."""
    return time.time() - time.monotonic()


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
