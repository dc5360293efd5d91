"""What a stage's time went to, and what it notes of it while it records."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.messages.stage_events import RecordingStopped
from headrace.core.runtime.clock import VirtualClock
from headrace.core.trace import Buffer, PlannedTokens, StageTrace, TransferTrace
from headrace.core.types.packed import pack
from headrace.engine.telemetry.meter import Meter
from headrace.engine.telemetry.recorder import MAX_ROWS, Recorder

TRANSFER = TransferTrace(1, "t", 0, 0, 10, 1.0, 2.0, "open")


def plan(seq: int, rows: int = 1) -> Forward:
    made = tuple(PlanRow(request, 8 * seq, 8, pack([0])) for request in range(rows))
    return Forward(seq=seq, rows=made)


def spans(recorded: RecordingStopped) -> StageTrace:
    return msgspec.msgpack.decode(recorded.spans, type=StageTrace)


def seconds(meter: Meter) -> dict[str, float]:
    values = {sample.name: sample.value for sample in meter.statistics().samples}
    return {name: values[f"stage_{name}_seconds_total"] for name in ("idle", "waiting", "busy")}


class Bench:
    """A meter and a recorder under a virtual clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.meter = Meter(0, self.clock)
        self.recorder = Recorder(0, self.meter)

    def run(self, seq: int, *, waits: float, computes: float, hands_on: float, rows: int = 1) -> float:
        """Take a plan through; returns what the meter says it took to compute."""
        self.meter.begin(plan(seq, rows))
        for step in (waits, computes):
            self.clock.advance(step)
            self.meter.mark()
        self.clock.advance(hands_on)
        run, took = self.meter.end()
        self.recorder.add_plan(run)
        return took

    def report(self, trace: int = 1) -> StageTrace:
        return spans(self.recorder.report(trace, self.clock.now(), ()))


STEPS = st.integers(0, 80).map(lambda eighths: eighths / 8)  # sums of these are exact


@given(st.lists(st.tuples(STEPS, STEPS, STEPS, STEPS, st.booleans()), max_size=20), STEPS)
def test_all_time_is_idle_waiting_or_busy(plans: list[tuple[float, float, float, float, bool]], more: float) -> None:
    """Read at any moment, also in the middle of something."""
    bench = Bench()
    expected = {"idle": 0.0, "waiting": 0.0, "busy": 0.0}
    for seq, (idles, waits, computes, hands_on, idle) in enumerate(plans):
        if idle:
            bench.meter.idle()
        bench.clock.advance(idles)
        expected["idle" if idle else "busy"] += idles
        assert bench.run(seq, waits=waits, computes=computes, hands_on=hands_on) == computes + hands_on
        expected["waiting"] += waits
        expected["busy"] += computes + hands_on
    bench.meter.begin(plan(99))
    bench.clock.advance(more)
    expected["waiting"] += more
    assert seconds(bench.meter) == expected


def test_nothing_is_kept_unless_it_records() -> None:
    bench = Bench()
    bench.run(1, waits=1, computes=1, hands_on=1)
    bench.recorder.transfers.add(TRANSFER)
    assert bench.report().plans == ()
    bench.recorder.start(2)
    bench.run(2, waits=0.5, computes=2, hands_on=0.25, rows=2)
    bench.recorder.transfers.add(TRANSFER)
    kept = bench.report(2)
    assert [(each.seq, each.marks) for each in kept.plans] == [(2, (103.0, 103.5, 105.5, 105.75))]
    assert kept.plans[0].rows == (PlannedTokens(0, 16, 8), PlannedTokens(1, 16, 8))
    assert kept.transfers == (TRANSFER,)
    assert kept.ended == 105.75
    bench.run(3, waits=0, computes=1, hands_on=0)
    assert bench.report(2).plans == ()


def test_the_plan_it_is_at_is_reported_as_far_as_it_has_come() -> None:
    bench = Bench()
    bench.recorder.start(1)
    bench.meter.begin(plan(1))
    bench.clock.advance(3)
    bench.meter.mark()
    bench.clock.advance(4)
    assert [each.marks for each in bench.report().plans] == [(100.0, 103.0)]
    bench.meter.mark()
    run, took = bench.meter.end()
    assert took == 4.0
    bench.recorder.add_plan(run)
    assert bench.report().plans == (), "the recording is over"


def test_the_same_trace_goes_on_and_another_begins_anew() -> None:
    bench = Bench()
    bench.recorder.start(1)
    bench.run(1, waits=0, computes=1, hands_on=0)
    bench.recorder.start(1)
    bench.run(2, waits=0, computes=1, hands_on=0)
    bench.recorder.start(2)
    bench.run(3, waits=0, computes=1, hands_on=0)
    assert [each.seq for each in bench.report(2).plans] == [3]


def test_memory_is_bounded_and_what_is_lost_is_counted() -> None:
    bench = Bench()
    bench.recorder.start(1)
    rows = 999
    for seq in range(MAX_ROWS // 1000 + 3):
        bench.run(seq, waits=0, computes=1, hands_on=0, rows=rows)
    bench.run(1000, waits=0, computes=1, hands_on=0)
    kept = bench.report()
    assert (len(kept.plans), kept.dropped_plans) == (MAX_ROWS // 1000, 4)


@given(st.integers(0, 10), st.lists(st.integers(1, 5), max_size=10))
def test_a_buffer_is_complete_up_to_a_moment(limit: int, sizes: list[int]) -> None:
    buffer: Buffer[int] = Buffer(limit)
    buffer.add(-1)
    for _ in range(2):
        buffer.start()
        for number, size in enumerate(sizes):
            buffer.add(number, size)
        kept, dropped = buffer.stop()
        fits = max(count for count in range(len(sizes) + 1) if sum(sizes[:count]) <= limit)
        assert kept == tuple(range(fits))
        assert dropped == len(sizes) - fits
    assert buffer.stop() == ((), dropped)
