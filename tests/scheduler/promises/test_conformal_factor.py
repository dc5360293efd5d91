"""The factor of promises: whatever predictions are worth, as many promises are kept as were to be."""

import random
from collections.abc import Callable

import pytest

from headrace.scheduler.promises.conformal_factor import HIGHEST_LEVEL, MOST_SCORES, STEP, UNSURE, ConformalFactor

Ratio = Callable[[int, random.Random], float]


def kept_share(share: float, ratio: Ratio, promises: int, seed: int = 0, last: int | None = None) -> float:
    """Share of the promises that were kept, of the last ones. ratio: actual time / predicted bound of each."""
    calibration, drawing, kept = ConformalFactor(share), random.Random(seed), []
    for number in range(promises):
        actual = ratio(number, drawing)
        kept.append(actual <= calibration.factor)
        calibration.ended(kept=kept[-1])
        calibration.score(actual)
    counted = kept[-(last or promises) :]
    return sum(counted) / len(counted)


RATIOS: dict[str, Ratio] = {
    "right": lambda _number, drawing: drawing.uniform(0.5, 1.0),
    "too small by a factor": lambda _number, drawing: 7 * drawing.uniform(0.5, 1.0),
    "heavy tail": lambda _number, drawing: drawing.paretovariate(1.5),
    "worse from the middle on": lambda number, drawing: (1 if number < 5000 else 5) * drawing.lognormvariate(0, 0.5),
    "waves": lambda number, drawing: (1 + number // 500 % 3) * drawing.lognormvariate(0, 0.3),
    "worse all the time": lambda number, drawing: (1 + number / 1000) * drawing.uniform(0.5, 1.0),
}


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", RATIOS)
def test_as_many_are_kept_as_were_promised(name: str, share: float) -> None:
    """The theorem bounds the distance by (1 + γ) / (γ · promises); a finite factor adds what is beyond it."""
    promises = 10_000
    step = STEP * (1 - share)
    allowed = (HIGHEST_LEVEL + step) / (step * promises)
    assert abs(kept_share(share, RATIOS[name], promises) - share) <= allowed + 0.002


def test_the_bound_gets_tight_again_when_predictions_are_right() -> None:
    calibration, drawing = ConformalFactor(0.99), random.Random(1)
    for spell, factor in ((300, 5.0), (3 * MOST_SCORES, 1.0)):
        for _ in range(spell):
            actual = factor * drawing.uniform(0.5, 1.0)
            calibration.ended(kept=actual <= calibration.factor)
            calibration.score(actual)
        assert 0.9 * factor < calibration.factor <= UNSURE * factor


def test_the_first_bounds_are_wider() -> None:
    calibration = ConformalFactor(0.9)
    assert calibration.factor == UNSURE
    calibration.score(2.0)
    assert calibration.factor == 2.0 * UNSURE, "one score is no ninth decile"
    for _ in range(20):
        calibration.score(2.0)
    assert calibration.factor == 2.0


def test_the_window_of_scores_is_bounded() -> None:
    calibration = ConformalFactor(0.5)
    for _ in range(MOST_SCORES):
        calibration.score(9.0)
    for _ in range(MOST_SCORES):
        calibration.score(1.0)
    assert calibration.factor == 1.0
