"""What a stage has done: seconds that its compute thread was busy, waiting and idle, and rows of its experts."""

from typing import Literal, NamedTuple

from headrace.core.messages.orders import Forward
from headrace.core.runtime.clock import Clock
from headrace.core.stats import Sample, Stats
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.engine.layers.moe import ExpertRows


class PlanRun(NamedTuple):
    """One plan's execution on this stage."""

    plan: Forward
    marks: tuple[float, ...]
    """Seconds of the monotonic clock: turn began (waiting for other stages), layers began, sampling or sending began,
    done. A plan under way has only its first marks."""


class _Reading(NamedTuple):
    """State of the compute thread, and the seconds it spent in each state before."""

    state: Literal["idle", "waiting", "busy"]
    since: float  # seconds of the monotonic clock
    run: PlanRun | None = None  # the current plan
    idle: float = 0.0
    waiting: float = 0.0
    busy: float = 0.0


class Meter:
    """Seconds of a stage by state, its current plan, and bytes of hidden states sent to the next stage.

    busy: computing; waiting: for hidden states, tokens or votes of others; idle: no plan here. The compute thread
    writes and the I/O thread reads; a reading is replaced as a whole, so the reader never sees half an update.
    """

    def __init__(self, stage: int, clock: Clock) -> None:
        """stage: pipeline rank, the label of the metrics."""
        self.stage = stage
        self._labels = (str(stage),)
        self._clock = clock
        self._reading = _Reading("busy", clock.now())
        self._device_s: float | None = None  # seconds of a GPU, once it has computed a plan
        self._hidden_bytes = 0

    def idle(self) -> None:
        """No plan is queued."""
        self._switch("idle", None)

    def wait(self) -> None:
        """Nothing is computed before other ranks have agreed."""
        self._switch("waiting", None)

    def begin(self, plan: Forward) -> None:
        """A plan's turn has come; it may have to wait for another stage."""
        self._switch("waiting", PlanRun(plan, ()))

    def mark(self) -> None:
        """The plan's next step begins: its layers, then sampling or sending."""
        self._switch("busy", self._reading.run)

    def end(self) -> tuple[PlanRun, float]:
        """The plan is done. Returns it and the seconds from the start of its layers to now."""
        run = self._switch("busy", self._reading.run)
        assert run is not None, "a plan has begun"
        self._reading = self._reading._replace(run=None)
        return run, run.marks[-1] - run.marks[1]

    def device_done(self, run: PlanRun, seconds: float) -> PlanRun:
        """A GPU has come to the end of a plan, for which it worked so long. Returns its run as the device saw it. Used
        by one thread."""
        self._device_s = (self._device_s or 0.0) + seconds
        now = self._clock.now()
        waited, *_ = run.marks
        return PlanRun(run.plan, (waited, max(waited, now - seconds), *(now for _ in run.marks[2:])))

    def add_hidden_bytes(self, size: int) -> None:
        """Count bytes of hidden states sent to the next stage."""
        self._hidden_bytes += size

    @property
    def run(self) -> PlanRun | None:
        """The plan under way, if any."""
        return self._reading.run

    def statistics(self) -> Stats:
        """Counters of this stage, labelled with its number."""
        idle, waiting, busy = _seconds(self._reading, self._clock.now())
        if (computed := self._device_s) is not None:  # the thread is through with plans long before the device is
            idle, busy = max(0.0, idle + busy - computed), computed
        return Stats(
            samples=(
                Sample("stage_busy_seconds_total", busy, self._labels),
                Sample("stage_waiting_seconds_total", waiting, self._labels),
                Sample("stage_idle_seconds_total", idle, self._labels),
                Sample("hidden_bytes_total", float(self._hidden_bytes), self._labels),
            )
        )

    def _switch(self, state: Literal["idle", "waiting", "busy"], run: PlanRun | None) -> PlanRun | None:
        """Enter a state. Returns the run with the current time as its next mark."""
        now = self._clock.now()
        run = run and PlanRun(run.plan, (*run.marks, now))
        self._reading = _Reading(state, now, run, *_seconds(self._reading, now))
        return run


def _seconds(reading: _Reading, now: float) -> tuple[float, float, float]:
    """Seconds idle, waiting and busy until now."""
    _, since, _, idle, waiting, busy = reading
    passed = max(0.0, now - since)
    match reading.state:
        case "idle":
            return idle + passed, waiting, busy
        case "waiting":
            return idle, waiting + passed, busy
        case "busy":
            return idle, waiting, busy + passed


class ExpertMeter:
    """Rows per expert since this meter was made, so that warm-up does not count. Used by the I/O thread; the compute
    thread counts."""

    def __init__(self, stage: int, rows: ExpertRows | None) -> None:
        """stage: pipeline position. rows: the counters of the runner; None for a dense model."""
        self._stage = stage
        self._rows = rows
        self._before = rows.counts() if rows is not None else None

    def load(self) -> ExpertLoad | None:
        """The counts; None for a stage without experts."""
        if self._rows is None or self._before is None:
            return None
        counts = self._rows.counts() - self._before
        return ExpertLoad(
            stage=self._stage, layers=self._rows.layers, first=self._rows.first, rows=counts.astype("<i8").tobytes()
        )

    def statistics(self) -> Stats:
        """Rows that all experts of this rank have computed."""
        if self._rows is None or self._before is None:
            return Stats()
        rows = float((self._rows.counts() - self._before).sum())
        return Stats((Sample("stage_expert_rows_total", rows, (str(self._stage),)),))
