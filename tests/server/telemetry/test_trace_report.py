"""The trace of a recording: well-formed for any recording, on one clock, complete."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.trace import (
    LoadSample,
    PhaseTrace,
    PlannedTokens,
    PlanTrace,
    RequestName,
    SchedulerTrace,
    StageTrace,
    TransferTrace,
)
from headrace.core.types.ranks.layout import Layout
from headrace.server.telemetry.trace_report import trace_json
from headrace.server.telemetry.tracer import RecordedTrace
from tests.server.telemetry.trace_format import check, lanes, of

START, END = 1000.0, 1002.0
OFFSET = 1.7e9
NAMES = (RequestName(11, 1, "a", "ticket-a", "peer-a"), RequestName(12, 2, "b", "", ""))


def scheduler(stages: int, **changes: Any) -> SchedulerTrace:
    trace = SchedulerTrace(
        started=START, ended=END, stages=stages, names=NAMES, spans=(), phases=("waiting", "running"), loads=(),
        dropped=0,
    )  # fmt: skip
    return msgspec.structs.replace(trace, **changes)


def stage(*plans: PlanTrace, **changes: Any) -> StageTrace:
    trace = StageTrace(
        plans=plans, transfers=(), dropped_plans=0, dropped_transfers=0, ended=END, wall_offset_s=OFFSET
    )  # fmt: skip
    return msgspec.structs.replace(trace, **changes)


def drawn(of_scheduler: SchedulerTrace, *stages: StageTrace | None) -> dict[str, Any]:
    """The checked trace of these stages; None for one that did not answer."""
    parts = {number: msgspec.msgpack.encode(each) for number, each in enumerate(stages) if each is not None}
    trace: dict[str, Any] = json.loads(trace_json(RecordedTrace(of_scheduler, parts), OFFSET, {"role": "prefill"}))
    check(trace)
    return trace


def plan(seq: int, *marks: float) -> PlanTrace:
    rows = (PlannedTokens(11, 0, 64), PlannedTokens(12, 128, 1))
    return PlanTrace(seq, tuple(START + mark for mark in marks), rows)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[StageTrace, ...]:
    """Plans 1 to n on every stage, one after another, from before the start of the trace on; the last one may be
    unfinished. Any transfers."""
    count = draw(st.integers(0, 6))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        at = START + draw(st.floats(-1.0, 0.5))
        plans = []
        for seq in range(1, count + 1):
            steps = [draw(st.floats(0.0, 0.3)) for _ in range(draw(st.integers(1, 4)) if seq == count else 4)]
            marks = [at := at + step for step in steps]
            plans.append(PlanTrace(seq, tuple(marks), (PlannedTokens(11, seq, 1),)))
        transfers = []
        for chunk in range(draw(st.integers(0, 5))):
            sent = START + draw(st.floats(-1.0, 2.0))
            ended = sent + draw(st.floats(0.0, 1.0))
            transfers.append(TransferTrace(11, "t", chunk, 0, 10, sent, ended, "acknowledged"))
        stages.append(stage(*plans, transfers=tuple(transfers), ended=max(END, at)))
    return tuple(stages)


@given(timelines())
def test_every_recording_makes_a_well_formed_trace(stages: tuple[StageTrace, ...]) -> None:
    trace = drawn(scheduler(len(stages)), *stages)
    for number, each in enumerate(stages):
        shown = [event["args"]["plan"] for event in of(trace, "X", "compute", number + 2)]
        computing = [(plan, (*plan.marks[1:3], each.ended)[1]) for plan in each.plans if len(plan.marks) > 1]
        assert shown == [plan.seq for plan, end in computing if round((end - START) * 1e9) > 0]
    assert len(lanes(trace, "transfer")) == sum(
        round((transfer.ended - START) * 1e9) > 0 for each in stages for transfer in each.transfers
    )


@st.composite
def request_phases(draw: st.DrawFn) -> tuple[PhaseTrace, ...]:
    """Requests, each with phases that follow each other without a gap; the log has them in the order of their ends."""
    phases = []
    for request in range(draw(st.integers(0, 5))):
        at = START + draw(st.floats(-1.0, 1.0))
        names = draw(st.lists(st.sampled_from(["waiting", "running"]), min_size=1, max_size=4))
        for name, then in zip(names, [*names[1:], draw(st.sampled_from(["done", "failed", ""]))], strict=True):
            before, at = at, at + draw(st.just(0.0) | st.floats(0.0, 0.5))
            phases.append(PhaseTrace(request, name, before, at, then))
    return tuple(sorted(phases, key=lambda phase: phase.end))


@given(request_phases())
def test_requests_are_made_of_their_phases(phases: tuple[PhaseTrace, ...]) -> None:
    trace = drawn(scheduler(0, spans=phases))
    for events in lanes(trace, "request"):
        whole, *parts, end = events
        assert (whole["ph"], end["ph"], whole["name"]) == ("b", "e", end["name"])
        times = [event["ts"] for event in parts]
        assert times[1:-1:2] == times[2::2], "a phase begins when the one before it ends"
        assert [whole["ts"], end["ts"]] == [times[0], times[-1]]


def test_steps_of_a_plan_and_its_way_from_stage_to_stage() -> None:
    first = stage(plan(7, 0.0, 0.001, 0.101, 0.102))
    second = stage(plan(7, 0.0, 0.1025, 0.2025, 0.203))
    trace = drawn(scheduler(2), first, second)
    steps = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in of(trace, "X")]
    assert sorted(steps) == [
        (2, "compute", 1000.0, 100000.0),
        (2, "pass on", 101000.0, 1000.0),
        (2, "wait", 0.0, 1000.0),
        (3, "compute", 102500.0, 100000.0),
        (3, "sample", 202500.0, 500.0),
        (3, "wait", 0.0, 102500.0),
    ]
    for event in of(trace, "X"):
        assert event["args"] == {
            "plan": 7,
            "rows": 2,
            "tokens": 65,
            "requests": [{"rid": "a", "start": 0, "count": 64}, {"rid": "b", "start": 128, "count": 1}],
        }
    (leaves,), (arrives,) = of(trace, "s"), of(trace, "f")
    assert (leaves["pid"], leaves["ts"], arrives["pid"], arrives["ts"]) == (2, 101000.0, 3, 102500.0)


def test_the_unfinished_step_of_a_plan_lasts_to_the_end() -> None:
    trace = drawn(scheduler(2), stage(plan(1, 0.1, 0.2)), stage(plan(1, 0.1)))
    shown = [(event["pid"], event["name"], event["dur"]) for event in of(trace, "X") if "unfinished" in event["args"]]
    assert shown == [(3, "wait", 1_900_000.0), (2, "compute", 1_800_000.0)]
    assert len(of(trace, "X")) == 3


def test_a_stage_on_another_machine_is_put_on_our_clock() -> None:
    """Its monotonic clock is 500 s behind that of the scheduler, its time of day 3 ms ahead."""
    away = stage(
        PlanTrace(1, (500.5, 500.6, 500.7, 500.8), ()), wall_offset_s=OFFSET + 500.0 + 0.003, ended=END - 500.0
    )
    trace = drawn(scheduler(2), stage(plan(1, 0.3, 0.4, 0.5, 0.6)), away)
    (event,) = of(trace, "X", "compute", pid=3)
    assert event["ts"] == pytest.approx(603_000.0, abs=1.0), "0.6 s after the start, and the 3 ms within the tolerance"
    assert len(of(trace, "s")) == 1


def test_noise_between_processes_of_one_machine_moves_nothing() -> None:
    trace = drawn(scheduler(1), stage(plan(1, 0.1, 0.2, 0.3, 0.4), wall_offset_s=OFFSET + 0.0004))
    (event,) = of(trace, "X", "compute")
    assert event["ts"] == 200_000.0


def test_transfers_name_their_request() -> None:
    transfers = (
        TransferTrace(11, "ticket-a", 0, 1, 4096, START + 0.1, START + 0.4, "acknowledged"),
        TransferTrace(99, "ticket-z", 3, 0, 1, START + 0.2, END, "open"),
    )
    trace = drawn(scheduler(1), stage(transfers=transfers))
    begins = [event for event in of(trace, "b") if event["cat"] == "transfer"]
    assert begins[0]["args"] == {
        "rid": "a", "ticket": "ticket-a", "chunk": 0, "bytes": 4096, "peer": "peer-a", "peer_stage": 1,
        "outcome": "acknowledged",
    }  # fmt: skip
    assert begins[1]["args"]["rid"] == "request 99", "a request that the scheduler has no name of"


def test_counters_show_changes() -> None:
    loads = (
        LoadSample(START, 0, 0, (1, 0), 5),
        LoadSample(START + 0.1, 1, 1, (0, 1), 0),
        LoadSample(START + 0.2, 1, 1, (0, 0), 0),
    )
    trace = drawn(scheduler(0, loads=loads))
    assert [event["args"] for event in of(trace, "C", "plans in flight")] == [{"plans": 0}, {"plans": 1}]
    assert [event["args"] for event in of(trace, "C", "queues")] == [
        {"waiting": 1, "running": 0}, {"waiting": 0, "running": 1}, {"waiting": 0, "running": 0},
    ]  # fmt: skip
    assert [event["ts"] for event in of(trace, "C", "unplanned tokens")] == [0.0, pytest.approx(100_000.0)]


def test_missing_parts_are_named() -> None:
    full = stage(plan(1, 0.1, 0.2, 0.3, 0.4), dropped_plans=17)
    trace = drawn(scheduler(3, dropped=2), full, None, stage())
    other = trace["otherData"]
    assert other["missing"] == ["stage 1"]
    assert other["dropped"] == {"scheduler": 2, "stage 0": 17, "stage 2": 0}
    assert (other["role"], other["seconds"], other["started"]) == ("prefill", 2.0, START + OFFSET)
    (moment,) = of(trace, "i")
    assert "17 more plans" in moment["name"]
    assert (moment["pid"], moment["ts"]) == (2, pytest.approx(400_000.0))


def test_hidden_states_pass_from_a_shard_to_the_same_shard_of_the_next_stage() -> None:
    first = stage(plan(7, 0.0, 0.001, 0.101, 0.102))
    second = stage(plan(7, 0.0, 0.1025, 0.2025, 0.203))
    trace = drawn(scheduler(4, layout=Layout(pp=2, tp=2)), first, first, second, None)
    assert {event["pid"] for event in of(trace, "X") if event["name"] == "pass on"} == {2, 3}
    assert {event["pid"] for event in of(trace, "X") if event["name"] == "sample"} == {4}
    arrows = [(event["ph"], event["pid"]) for event in trace["traceEvents"] if event["ph"] in ("s", "f")]
    assert arrows == [("s", 2), ("f", 4)]
    assert trace["otherData"]["missing"] == ["rank 3 (stage 1, replica 0, shard 1)"]
