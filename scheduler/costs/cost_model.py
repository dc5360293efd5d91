"""The cost model of prefill: predicted seconds of a forward pass, and of what a request has left to compute.

A stage computes count tokens after a prefix of start tokens in

    a · ((start + count)² - start²) + b · count + c seconds     attention, matrix products, overhead of a pass

so that the costs of a prompt's chunks add up, c apart. The slowest stage decides, since a pipeline runs at its pace.

Where the coefficients come from, later ones first:
    the plans that were computed    fitted online, with forgetting
    what the stages measured        at their start (StageReady.cost), under --chunking dynamic
    a default                       only the relation of its coefficients counts: the first plan sets the scale
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.costs.cost_fit import CostFit

WINDOW_S = 600.0
SLICE_S = 60.0
LIMIT = 0.2
"""A median error beyond this share, either way, makes the predictions stale."""

ENOUGH = 32
"""Predictions without which no median is judged."""

BOUNDS = (-0.9, -0.75, -0.5, -0.35, -LIMIT, -0.1, 0.0, 0.1, LIMIT, 0.35, 0.5, 1.0, 2.0, 5.0)
DEFAULT: Cost = (1e-9, 1e-4, 5e-3)
RECENT_ERRORS = 64  # that are kept one by one
KEY_DRIFT = 1.5  # predictions may change by this factor before keys that were computed from them are renewed
KEY_LENGTHS = (1, 16)  # prompts by which that is judged, in plans


class PredictionError:
    """The signed error of predictions over the last ten minutes, and whether its median says that they are wrong.

    Counts (predicted - actual) / actual in buckets, by minute, so that taking a median costs little. The median is
    judged when the window is full, and with each full minute from then on.
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


class Load(NamedTuple):
    """Work, as the numbers that the cost of every stage is linear in. Loads add up exactly: they are integers."""

    squares: int
    """Sum of (start + count)² - start²."""

    tokens: int
    """Sum of count."""

    @classmethod
    def between(cls, start: int, end: int) -> "Load":
        """The load of positions [start, end); nothing when end is not above start."""
        return cls(end * end - start * start, end - start) if end > start else NOTHING

    def plus(self, other: "Load") -> "Load":
        """Both."""
        return Load(self.squares + other.squares, self.tokens + other.tokens)

    def minus(self, other: "Load") -> "Load":
        """What is left without the other."""
        return Load(self.squares - other.squares, self.tokens - other.tokens)


NOTHING = Load(0, 0)


class CostModel:
    """Predicts seconds, rounded to microseconds, from the plans that were computed. Pure and deterministic.

    When the median error of its predictions has left ±20 % for ten minutes it is stale: predictions then follow from
    tokens alone, at the recent speed.
    """

    def __init__(self, stages: int, chunk_tokens: int) -> None:
        """chunk_tokens: tokens of a full plan."""
        self._chunk = chunk_tokens
        self._fits = [CostFit(DEFAULT, chunk_tokens) for _ in range(stages)]
        self._errors = [PredictionError() for _ in range(stages)]
        self._full = Load.between(0, chunk_tokens)
        self._costs: tuple[Cost, ...] = ()
        self._key_costs: tuple[Cost, ...] = ()
        self.ratios: deque[float] = deque(maxlen=RECENT_ERRORS)
        """Seconds that the last passes took, divided by those that were predicted, on any stage."""

        self.decoding_ratios: deque[float] = deque(maxlen=RECENT_ERRORS)
        """The same of passes with so many decode rows that nothing is learnt from them."""

        self.stale = False
        """Predictions of the slowest stage have been wrong for ten minutes."""

        self.key_version = 0
        """Rises when keys that were computed with key_s() have to be computed again."""

        self._refresh()
        self._renew_keys()

    def start(self, costs: Sequence[Cost | None]) -> None:
        """The stages are up. costs: what each of them measured, None where it has not."""
        for stage, cost in enumerate(costs):
            if cost is not None and sum(cost[:2]) > 0:
                self._fits[stage] = CostFit(cost, self._chunk, measured=True)
                self._errors[stage] = PredictionError()
        self._refresh()
        self._renew_keys()

    def observe(self, stage: int, load: Load, seconds: float, now: float) -> None:
        """A stage has computed a plan of this load in so many seconds."""
        if load.tokens <= 0 or seconds <= 0:
            return
        fit = self._fits[stage]
        if fit.scaled:
            predicted = _seconds(fit.cost, load)
            self._errors[stage].observe(predicted, seconds, now)
            self.ratios.append(seconds / predicted)
        fit.observe(load.squares, load.tokens, seconds)
        self._refresh()
        if self._keys_drifted():
            self._renew_keys()

    def observe_decoding(self, stage: int, load: Load, seconds: float) -> None:
        """A stage has computed a plan in which most rows decode: what it says nothing of is how far off it was."""
        if self._fits[stage].scaled and seconds > 0:
            self.decoding_ratios.append(seconds / _seconds(self._fits[stage].cost, load))

    @property
    def stage_costs(self) -> tuple[Cost, ...]:
        """Of each stage, as predictions have them."""
        return self._costs

    def first_stage_s(self, load: Load) -> float:
        """Seconds of a forward pass of this load on the first stage."""
        return _rounded(_seconds(self._costs[0], load))

    def worth_filling(self, ends: int, others: int, part: Load) -> bool:
        """Whether the mean time to first token gains when a pass in which so many prompts end is filled up with this
        part of another one. It gets longer for them; what it leaves costs the others a share of one more pass."""
        if not ends or not self.trusted:
            return True
        longer_s = sum(a * part.squares + b * part.tokens for a, b, _ in self._costs)
        return ends * longer_s <= others * max(c for _, _, c in self._costs) * part.tokens / self._chunk

    def load_s(self, load: Load) -> float:
        """Seconds of this load in full plans, each of which has its overhead."""
        return self._slowest(self._costs, load)

    @property
    def per_token(self) -> tuple[float, float]:
        """Seconds per squared token and per token on the stage that takes longest for a full plan, whose overhead is
        shared among its tokens."""
        a, b, c = max(self._costs, key=lambda cost: self._part(cost, self._full))
        return a, b + c / self._chunk

    def last_pass_s(self, tokens: int) -> float:
        """What the last of the passes over so many tokens adds to load_s(), as it is not full: a share of c."""
        share = -tokens % self._chunk / self._chunk
        return _rounded(max(c for _, _, c in self._costs) * share)

    def fill_s(self, load: Load) -> float:
        """Seconds that this load, in one pass, takes in all stages but the slowest."""
        parts = [_seconds(cost, load) for cost in self._costs]
        return _rounded(sum(parts) - max(parts))

    def key_s(self, load: Load) -> float:
        """As load_s(), with coefficients that stay the same until key_version rises: keys compare with each other."""
        return self._slowest(self._key_costs, load)

    @property
    def trusted(self) -> bool:
        """Predictions are seconds, and are not stale: some plan was computed, or the stages have measured theirs."""
        return not self.stale and all(fit.scaled for fit in self._fits)

    def _slowest(self, costs: tuple[Cost, ...], load: Load) -> float:
        seconds = 0.0
        for cost in costs:
            seconds = max(seconds, self._part(cost, load))
        return _rounded(seconds)

    def _refresh(self) -> None:
        """Take over what the fits and the errors say now."""
        parts = [self._part(fit.cost, self._full) for fit in self._fits]
        self.stale = self._errors[parts.index(max(parts))].stale
        self._costs = tuple(fit.by_tokens if self.stale else fit.cost for fit in self._fits)

    def _part(self, cost: Cost, load: Load) -> float:
        a, b, c = cost
        return a * load.squares + (b + c / self._chunk) * load.tokens

    def _renew_keys(self) -> None:
        self._key_costs = self._costs
        self.key_version += 1

    def _keys_drifted(self) -> bool:
        for plans in KEY_LENGTHS:
            load = Load.between(0, plans * self._chunk)
            old, new = self.key_s(load), self.load_s(load)
            if not old <= new * KEY_DRIFT or not new <= old * KEY_DRIFT:
                return True
        return False


def _seconds(cost: Cost, load: Load) -> float:
    a, b, c = cost
    return a * load.squares + b * load.tokens + c


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
