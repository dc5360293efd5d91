"""What a stage notes while it records: the I/O thread's own books, filled from what the compute thread hands over."""

from collections.abc import Iterable

import msgspec

from headrace.core.messages.stage_events import RecordingStopped
from headrace.core.runtime.clock import wall_offset
from headrace.core.trace import Buffer, PlannedTokens, PlanTrace, StageTrace, TransferTrace
from headrace.engine.telemetry.meter import Meter, Run

MAX_ROWS = 100_000  # rows of plans, with one for the plan itself; about ten megabytes of memory
MAX_TRANSFERS = 50_000


class Recorder:
    """Used by the I/O thread alone. While it is off it keeps nothing. transfers: which the sender fills."""

    def __init__(self, stage: int, meter: Meter) -> None:
        self._stage = stage
        self._meter = meter
        self._plans: Buffer[PlanTrace] = Buffer(MAX_ROWS)
        self._trace: int | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self.transfers: Buffer[TransferTrace] = Buffer(MAX_TRANSFERS)

    def start(self, trace: int) -> None:
        """Record for this trace from now on, unless that is under way."""
        if trace != self._trace:
            self._trace = trace
            self._plans.start()
            self.transfers.start()

    def computed(self, run: Run) -> None:
        """A plan is done."""
        if self._plans.on:
            self._plans.add(_plan_trace(run), 1 + len(run.plan.rows))

    def report(self, trace: int, now: float, unanswered: Iterable[TransferTrace]) -> RecordingStopped:
        """End the recording. unanswered: transfers that are still on their way."""
        run = self._meter.run
        if run is not None:
            self.computed(run)  # as far as it has come: it may be what everybody waits for
        for transfer in unanswered:
            self.transfers.add(transfer)
        plans, dropped_plans = self._plans.stop()
        transfers, dropped_transfers = self.transfers.stop()
        self._trace = None
        spans = StageTrace(
            plans=plans,
            transfers=transfers,
            dropped_plans=dropped_plans,
            dropped_transfers=dropped_transfers,
            ended=now,
            wall_offset_s=wall_offset(),
        )
        return RecordingStopped(stage=self._stage, trace=trace, spans=self._encoder.encode(spans))


def _plan_trace(run: Run) -> PlanTrace:
    rows = tuple(PlannedTokens(row.request, row.start, row.count) for row in run.plan.rows)
    return PlanTrace(run.plan.seq, run.marks, rows)
