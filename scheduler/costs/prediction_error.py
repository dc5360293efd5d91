"""The signed error of predictions over the last ten minutes, and whether its median says that they are wrong."""

from bisect import bisect_left
from collections import deque

WINDOW_S = 600.0
SLICE_S = 60.0
LIMIT = 0.2
"""A median error beyond this share, either way, makes the predictions stale."""

ENOUGH = 32
"""Predictions without which no median is judged."""

BOUNDS = (-0.9, -0.75, -0.5, -0.35, -LIMIT, -0.1, 0.0, 0.1, LIMIT, 0.35, 0.5, 1.0, 2.0, 5.0)


class PredictionError:
    """Counts (predicted - actual) / actual in buckets, by minute, so that taking a median costs little.

    The median is judged when the window is full, and with each full minute from then on.
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[int, list[int]]] = deque()  # minute, predictions by bucket
        self._since: float | None = None
        self.stale = False
        """The median has been outside the limit over the window."""

    def observe(self, predicted: float, actual: float, now: float) -> None:
        """A prediction was put to the test at this time."""
        if self._since is None:
            self._since = now
        minute = int(now // SLICE_S)
        if not self._slices or self._slices[-1][0] != minute:
            if now - self._since >= WINDOW_S:
                self._judge()
            self._slices.append((minute, [0] * (len(BOUNDS) + 1)))
            while self._slices[0][0] <= minute - WINDOW_S // SLICE_S:
                self._slices.popleft()
        self._slices[-1][1][bisect_left(BOUNDS, (predicted - actual) / actual)] += 1

    def _judge(self) -> None:
        counts = [sum(column) for column in zip(*(counts for _, counts in self._slices), strict=True)]
        total = sum(counts)
        if total < ENOUGH:
            return
        low, high = BOUNDS.index(-LIMIT), BOUNDS.index(LIMIT)
        self.stale = 2 * sum(counts[: low + 1]) > total or 2 * sum(counts[high + 1 :]) > total
