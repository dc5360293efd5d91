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
        return Stats(
            samples=(
                Sample("stage_busy_seconds_total", self._busy, self._labels),
                Sample("stage_waiting_seconds_total", self._waiting, self._labels),
                Sample("stage_idle_seconds_total", self._idle, self._labels),
                Sample("hidden_bytes_total", float(self._hidden_bytes), self._labels),
            )
        )

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before
