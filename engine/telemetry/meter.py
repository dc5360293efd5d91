"""What a stage's compute thread spends its time on."""

from typing import Literal, NamedTuple

from headrace.core.messages.orders import Forward
from headrace.core.runtime.clock import Clock
from headrace.core.stats import Sample, Stats


class Run(NamedTuple):
    """A plan on this stage. marks: when it came up, when its layers began, when sampling or passing on began, when all
    was done; the later ones are missing until then. Seconds of the monotonic clock."""

    plan: Forward
    marks: tuple[float, ...]


class _Reading(NamedTuple):
    """What the thread has been doing since when, and the seconds it spent on everything before."""

    doing: Literal["idle", "waiting", "busy"]
    since: float
    run: Run | None = None
    idle: float = 0.0
    waiting: float = 0.0
    busy: float = 0.0


class Meter:
    """Seconds of a stage by state, the plan it is at, and bytes of hidden states passed on.

    busy: computing; waiting: for hidden states or tokens of another stage; idle: no plan here. The compute thread
    writes. The I/O thread reads: a reading is replaced as a whole, so it sees no half of one.
    """

    def __init__(self, stage: int, clock: Clock) -> None:
        self._labels = (str(stage),)
        self._clock = clock
        self._reading = _Reading("busy", clock.now())
        self._hidden_bytes = 0

    def idle(self) -> None:
        """There is no plan."""
        self._turn("idle", None)

    def begin(self, plan: Forward) -> None:
        """A plan has come up, and may have to wait for another stage."""
        self._turn("waiting", Run(plan, ()))

    def step(self) -> None:
        """The plan waits for nobody any more, or has its layers behind it."""
        self._turn("busy", self._reading.run)

    def end(self) -> tuple[Run, float]:
        """The plan is done. Returns it, and the seconds that computing it took."""
        run = self._turn("busy", self._reading.run)
        assert run is not None, "a plan has begun"
        self._reading = self._reading._replace(run=None)
        return run, run.marks[-1] - run.marks[1]

    def passed_on(self, size: int) -> None:
        self._hidden_bytes += size

    @property
    def run(self) -> Run | None:
        """The plan that the stage is at."""
        return self._reading.run

    def statistics(self) -> Stats:
        idle, waiting, busy = _seconds(self._reading, self._clock.now())
        return Stats(
            samples=(
                Sample("stage_busy_seconds_total", busy, self._labels),
                Sample("stage_waiting_seconds_total", waiting, self._labels),
                Sample("stage_idle_seconds_total", idle, self._labels),
                Sample("hidden_bytes_total", float(self._hidden_bytes), self._labels),
            )
        )

    def _turn(self, doing: Literal["idle", "waiting", "busy"], run: Run | None) -> Run | None:
        """Do something else from now on. Returns the run with this moment as its next mark."""
        now = self._clock.now()
        run = run and Run(run.plan, (*run.marks, now))
        self._reading = _Reading(doing, now, run, *_seconds(self._reading, now))
        return run


def _seconds(reading: _Reading, now: float) -> tuple[float, float, float]:
    """Idle, waiting and busy until now."""
    _, since, _, idle, waiting, busy = reading
    passed = max(0.0, now - since)
    match reading.doing:
        case "idle":
            return idle + passed, waiting, busy
        case "waiting":
            return idle, waiting + passed, busy
        case "busy":
            return idle, waiting, busy + passed
