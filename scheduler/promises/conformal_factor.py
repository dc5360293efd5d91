"""Adaptive conformal inference: a factor on a predicted bound, by which it is kept as often as was promised.

    score    actual time / predicted bound, of each promise whose end is known
    factor   the quantile of the last scores at a level
    level    rises by γ · share with each promise that was broken, falls by γ · (1 - share) with each that was kept

So whatever the predictions are worth, and however that changes, the share of promises that are kept comes to what was
promised in the long run: its distance from that is at most (1 + γ) / (γ · promises). Gibbs and Candès, "Adaptive
Conformal Inference Under Distribution Shift" (2021), equation 2 and proposition 4.1.
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

MOST_SCORES = 512
STEP = 0.5
"""γ, in shares of what may be broken: for 99 %, one broken promise raises the level by 0.5 %."""

UNSURE = 2.0
"""Factor beyond the largest score, while there are fewer scores than the level asks for."""

HIGHEST_LEVEL = 1.05
"""The level does not rise further while all is broken, so that it comes down again when predictions are right."""


class ConformalFactor:
    """The factor for promises of one kind. Pure."""

    def __init__(self, share: float) -> None:
        """share: of the promises that are to be kept."""
        self._share = share
        self._step = STEP * (1 - share)
        self._level = share
        self._scores: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def factor(self) -> float:
        """What a predicted bound is multiplied by."""
        if not self._sorted:
            return UNSURE
        rank = ceil((len(self._sorted) + 1) * self._level)
        if rank > len(self._sorted):
            return UNSURE * max(1.0, self._sorted[-1])
        return self._sorted[max(0, rank - 1)]

    def ended(self, *, kept: bool) -> None:
        """A promise was kept or broken."""
        level = self._level - self._step * (1 - self._share) if kept else self._level + self._step * self._share
        self._level = min(max(level, 0.0), HIGHEST_LEVEL)

    def score(self, value: float) -> None:
        """The time to first token is known of a promise: it has this ratio to what was predicted."""
        self._scores.append(value)
        insort(self._sorted, value)
        if len(self._scores) > MOST_SCORES:
            oldest = self._scores.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
