"""Trace recording of a stage: times of plans and transfers, while GET /debug/trace records."""

from collections.abc import Iterable

import msgspec

from headrace.core.messages.stage_events import RecordingStopped
from headrace.core.runtime.clock import wall_offset
from headrace.core.trace import Buffer, PlannedTokens, PlanTrace, StageTrace, TransferTrace
from headrace.engine.telemetry.meter import Meter, PlanRun

MAX_ROWS = 100_000  # of all recorded plans, plus one for each plan; about ten megabytes of memory
MAX_TRANSFERS = 50_000


class Recorder:
    """Collects plans and transfers while recording is on. Used by the I/O thread alone."""

    def __init__(self, stage: int, meter: Meter) -> None:
        """stage: pipeline rank. meter: has the plan under way when a recording ends."""
        self._stage = stage
        self._meter = meter
        self._plans: Buffer[PlanTrace] = Buffer(MAX_ROWS)
        self._trace: int | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self.transfers: Buffer[TransferTrace] = Buffer(MAX_TRANSFERS)  # filled by the sender

    def start(self, trace: int) -> None:
        """Start a recording; does nothing when this trace is being recorded already."""
        if trace != self._trace:
            self._trace = trace
            self._plans.start()
            self.transfers.start()

    def add_plan(self, run: PlanRun) -> None:
        """Record a plan, if recording is on."""
        if self._plans.on:
            self._plans.add(_plan_trace(run), 1 + len(run.plan.rows))

    def report(self, trace: int, now: float, unanswered: Iterable[TransferTrace]) -> RecordingStopped:
        """End the recording and return it.

        now: seconds of the monotonic clock. unanswered: transfers that are not acknowledged yet.
        """
        run = self._meter.run
        if run is not None:
            self.add_plan(run)  # unfinished: it may be the one that holds up the pipeline
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


def _plan_trace(run: PlanRun) -> PlanTrace:
    rows = tuple(PlannedTokens(row.request, row.start, row.count) for row in run.plan.rows)
    return PlanTrace(run.plan.seq, run.marks, rows)
