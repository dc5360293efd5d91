"""What a stage's compute thread spends its time on."""

import time

from core.stats import Sample, Stats


class Meter:
    """Seconds of a stage by state, and bytes of hidden states passed on.

    busy: computing; waiting: for hidden states or tokens of another stage; idle: no plan here. The compute thread
    writes; the I/O thread reads, and may see one of the numbers a moment before another.
    """

    def __init__(self, stage: int) -> None:
        self._labels = (str(stage),)
        self._since = time.perf_counter()
        self._busy = self._waiting = self._idle = 0.0
        self._hidden_bytes = 0

    def busy(self) -> float:
        """What has passed since the last call of any was computing; returns it, in seconds."""
        seconds = self._lap()
        self._busy += seconds
        return seconds

    def waiting(self) -> None:
        self._waiting += self._lap()

    def idle(self) -> None:
        self._idle += self._lap()

    def passed_on(self, size: int) -> None:
        self._hidden_bytes += size

    def statistics(self) -> Stats:
        values = {
            "stage_busy_seconds_total": self._busy,
            "stage_waiting_seconds_total": self._waiting,
            "stage_idle_seconds_total": self._idle,
            "hidden_bytes_total": float(self._hidden_bytes),
        }
        return Stats(samples=tuple(Sample(name, value, self._labels) for name, value in values.items()))

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before
