"""Promises: bounds of the time to first token, when forecasts are made, and what has become of both.

    forecast   every few seconds, while requests come: samples of the time to first token, by length
    bound      what sums predict for the request now  ×  quantile of sample / prediction, at its length  ×  factor
    factor     by what was missed lately, for each length (conformal_factor.py), so that the promised share is kept

What was admitted since the forecast is in the first of these, and what sums do not know of in the second.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import ceil, log

from headrace.core.config.scheduler import PROMISES, PromiseLevel
from headrace.core.messages.forecasts import MakeForecast
from headrace.core.stats import Counters, Histograms
from headrace.core.types.forecast import Forecast, LengthBound
from headrace.scheduler.promises.conformal_factor import ConformalFactor
from headrace.scheduler.promises.recent import Recent, RecentArrival
from headrace.scheduler.requests.parts import TtftPromise
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.telemetry.metrics import RATIOS

LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
"""Tokens of the prompts that the twin tries. Promises are calibrated by the one that is next in predicted seconds."""

INTERVAL_S = 1.0
"""Between the beginnings of two forecasts, at least."""

CPU_SHARE = 0.05
"""Of a core that forecasts may take: they come as much later as they took longer."""

TARGET_S = 0.25
"""CPU seconds that a forecast should take: the steps of the next one follow from what this one took."""

STEPS = (600, 3000, 20_000)
"""Of a forecast: at least, of the first one, at most."""

KEPT_SAMPLES = 64
"""Of each length: those of the last forecasts."""

FAILED_S = 10.0
"""After a forecast that has failed."""

DUE_S = 0.125  # in which promises are looked at together
NEAREST = 0.5  # share of the way to the next length from which that is the nearer one
LEAST_S = 1e-6  # of a time that is a divisor


class _Samples:
    """What forecasts have found for one length."""

    def __init__(self) -> None:
        self.work_s = 0.0
        self.quantile = 1.0
        self._ratios: deque[float] = deque(maxlen=KEPT_SAMPLES)

    def add(self, work_s: float, ratios: tuple[float, ...], share: float) -> None:
        self.work_s = work_s
        self._ratios.extend(ratios)
        found = sorted(self._ratios)
        self.quantile = found[min(len(found), ceil(share * (len(found) + 1))) - 1]


class Promises:
    """Makes promises of one scheduler, and watches them. Pure and deterministic. False where none are to be made."""

    def __init__(self, level: PromiseLevel, counters: Counters, histograms: Histograms) -> None:
        self.share = PROMISES[level]
        """Of the promises that are to be kept; 0: none are made."""

        self.recent = Recent()
        self.forecast: Forecast | None = None
        self.forecast_at = 0.0
        """Time of the state that it is from."""

        self._counters = counters
        self._histograms = histograms
        self._samples = [_Samples() for _ in LENGTHS]
        self._known: list[tuple[float, int]] = []  # logarithm of the seconds, index of the length; ascending
        self._factors = [ConformalFactor(self.share) for _ in LENGTHS]
        self._due: dict[int, list[int]] = {}  # time in DUE_S -> arrival numbers of those whose bound has passed by then
        self._times: list[int] = []  # a heap of these times
        self._asked = self._changed = self._running = False
        self._began_at = self._next_at = 0.0
        self._count = 0
        self._steps = STEPS[1]

    def __bool__(self) -> bool:
        return self.share > 0

    def ask(self) -> None:
        """Somebody wants to know what a forecast says."""
        self._asked = True

    def arrived(self, arrival: RecentArrival) -> None:
        """A request has come that is to be computed here."""
        self.recent.arrivals.append(arrival)
        self._asked = self._changed = True

    def changed(self) -> None:
        """A plan is done: a forecast would find something else than the last one."""
        self._changed = True

    def begin(self, now: float) -> MakeForecast | None:
        """The order for the next forecast, if it is due."""
        if not (self._asked and self._changed) or self._running or now < self._next_at:
            return None
        self._asked, self._changed, self._running = False, False, True
        self._began_at, self._next_at = now, now + INTERVAL_S
        self._count += 1
        return MakeForecast(seed=self._count, steps=self._steps)

    def made(self, forecast: Forecast | None) -> None:
        """A forecast has come, or has failed (None)."""
        self._running = False
        self._counters.add("forecasts_total", labels=("failed" if forecast is None else "made",))
        if forecast is None:
            self._next_at = self._began_at + FAILED_S
            return
        self.forecast, self.forecast_at = forecast, self._began_at
        self._next_at = self._began_at + max(INTERVAL_S, forecast.took_s / CPU_SHARE)
        self._counters.add("forecast_cpu_seconds_total", forecast.took_s)
        if forecast.took_s > 0:
            steps = round(forecast.steps * TARGET_S / forecast.took_s)
            self._steps = min(max(steps, STEPS[0]), STEPS[2])
        for found in forecast.samples:
            if found.ratios and found.work_s > 0:
                self._samples[LENGTHS.index(found.tokens)].add(found.work_s, found.ratios, self.share)
        seconds = ((each.work_s, index) for index, each in enumerate(self._samples) if each.work_s)
        self._known = sorted((log(work_s), index) for work_s, index in seconds)

    def bound(self, work_s: float, predicted_s: float) -> TtftPromise | None:
        """The bound for a request with so many seconds of work, whose first token sums predict after so many; None
        while no forecast has found anything."""
        if not self._known:
            return None
        at = log(max(work_s, LEAST_S))
        above = bisect_left(self._known, (at, 0))
        low, high = self._known[max(0, above - 1)], self._known[min(above, len(self._known) - 1)]
        share = (at - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        index = (high if share > NEAREST else low)[1]
        quantiles = [self._samples[length].quantile for _, length in (low, high)]
        predicted_s *= quantiles[0] + min(max(share, 0.0), 1.0) * (quantiles[1] - quantiles[0])
        return TtftPromise(round(predicted_s * self._factors[index].factor, 6), max(predicted_s, LEAST_S), index)

    def bounds(self, ttft_s: Callable[[int], tuple[float, float]]) -> tuple[LengthBound, ...]:
        """Those of prompts of LENGTHS that samples are known of. ttft_s: seconds of work and to the first token that
        sums predict for a prompt of so many tokens, none of them cached."""
        lengths = sorted(LENGTHS[index] for _, index in self._known)
        found = ((tokens, self.bound(*ttft_s(tokens))) for tokens in lengths)
        return tuple(LengthBound(tokens, bound.bound_s) for tokens, bound in found if bound is not None)

    def promised(self, request: Request, promised: TtftPromise) -> None:
        """The bound was promised to a request that was admitted."""
        request.promised = promised
        self._watch(request.arrival, request.arrived + promised.bound_s)
        self._histograms.observe("promised_ttft_seconds", promised.bound_s)

    def first_token(self, request: Request, now: float) -> None:
        """A request has its first token."""
        promised = request.promised
        if promised is None or promised.ttft_s is not None:
            return
        promised.ttft_s = max(LEAST_S, now - request.arrived - request.spent.get(Phase.BOOTSTRAP, 0.0))
        self._factors[promised.length].score(promised.ttft_s / promised.predicted_s)
        self._histograms.observe("promised_ttft_ratio", promised.bound_s / promised.ttft_s, bounds=RATIOS)
        if promised.broken:
            return
        if promised.ttft_s > promised.bound_s:
            self._broken(promised)
        else:
            self._factors[promised.length].ended(kept=True)
            self._counters.add("promises_total", labels=("kept",))

    def ended(self, request: Request, now: float) -> None:
        """A request has ended, maybe before its first token: then nobody waits for it any more."""
        promised = request.promised
        if promised is None or promised.ttft_s is not None or promised.broken:
            return
        if _until(request, promised, now) < now:
            self._broken(promised)
        else:
            self._counters.add("promises_total", labels=("void",))

    def expire(self, find: Callable[[int], Request | None], now: float) -> None:
        """Count the promises whose time has passed, DUE_S after it at most. find: a request by its arrival number."""
        while self._times and self._times[0] * DUE_S <= now:
            for arrival in self._due.pop(heapq.heappop(self._times)):
                request = find(arrival)
                promised = request.promised if request is not None else None
                if request is None or promised is None or request.ended or promised.ttft_s is not None:
                    continue
                until = _until(request, promised, now)
                if until < now:
                    self._broken(promised)
                else:
                    self._watch(arrival, until)

    def _watch(self, arrival: int, until: float) -> None:
        """Look at the promise when its time has passed. A list for each DUE_S: a heap would have an entry for each
        promise, also of those that were kept long ago."""
        at = int(until / DUE_S) + 1
        if at not in self._due:
            self._due[at] = []
            heapq.heappush(self._times, at)
        self._due[at].append(arrival)

    def _broken(self, promised: TtftPromise) -> None:
        promised.broken = True
        self._factors[promised.length].ended(kept=False)
        self._counters.add("promises_total", labels=("broken",))


def _until(request: Request, promised: TtftPromise, now: float) -> float:
    """When the promise is broken. The time that the request waits for its peer is not in it."""
    return request.arrived + request.time_in(Phase.BOOTSTRAP, now) + promised.bound_s
