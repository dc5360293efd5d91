"""The scheduler's event source of forecasts: they are made in forked children, which have copies of its state.

MakeForecast ─► fork ─► child: one fork for each course of the next minute ─► ForecastMade
"""

import logging
import resource
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.runtime.forked import Forked, ForkFailed, run_forked
from headrace.core.stats import Sample, Stats
from headrace.core.types.forecast import Forecast
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.twin.forecast import make_forecast

log = logging.getLogger(__name__)

LIMIT_S = 20.0
"""That a forecast may take; on a busy machine it gets little of a core."""

COURSE_LIMIT_S = 5.0
"""That one of its copies may take."""


class Forecaster:
    """Takes MakeForecast, one at a time, and answers each with ForecastMade. Used in the thread of the loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._child: Forked | None = None
        self._due: float | None = None
        self._fork_s = 0.0

    def sockets(self) -> Sequence[int]:
        """The pipe from the child, while there is one."""
        return () if self._child is None else (self._child.fileno(),)

    def receive(self, now: float) -> Sequence[ForecastMade]:
        """What the child has found, when all of it is here."""
        if self._child is None:
            return ()
        try:
            found = self._child.result()
        except ForkFailed as error:
            log.warning("no forecast: %s", error)
            return self._answer(None)
        return () if found is None else self._answer(msgspec.msgpack.decode(found, type=Forecast))

    def apply(self, command: MakeForecast, now: float) -> Sequence[ForecastMade]:
        """Fork."""
        self.close()
        scheduler, began = self._scheduler, time.perf_counter()

        def forecast() -> bytes:
            made = make_forecast(scheduler, now, command.seed, command.steps, _copied)
            return msgspec.msgpack.encode(msgspec.structs.replace(made, took_s=_cpu_s()))

        try:
            self._child = Forked(forecast, LIMIT_S)
        except OSError as error:
            log.warning("no forecast: no child can be had: %s", error)
            return self._answer(None)
        finally:
            self._fork_s += time.perf_counter() - began
        self._due = now + LIMIT_S
        return ()

    def tick(self, now: float) -> Sequence[ForecastMade]:
        """The child's time is over."""
        self._due = now + LIMIT_S
        return self.receive(now)

    def next_deadline(self) -> float | None:
        """When the child's time is over."""
        return self._due

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = self._due = None

    def statistics(self) -> Stats:
        """What forks have taken of the loop's time."""
        return Stats((Sample("forecast_fork_seconds_total", self._fork_s),))

    def _answer(self, forecast: Forecast | None) -> Sequence[ForecastMade]:
        self.close()
        return (ForecastMade(forecast=forecast),)


def _copied(function: Callable[[], bytes]) -> bytes:
    return run_forked(function, COURSE_LIMIT_S)


def _cpu_s() -> float:
    """CPU seconds of this process and the children that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
