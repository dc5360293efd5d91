"""What the scheduler records during a trace, and what it orders its stages to record."""

from collections import defaultdict

import pytest

from headrace.core.messages.frontend import EndTrace, StartTrace
from headrace.core.messages.orders import StartRecording, StopRecording
from headrace.core.messages.replies import StageTraced, Traced
from headrace.core.messages.stage_events import RecordingStopped, StageFailed
from headrace.core.trace import PhaseTrace, SchedulerTrace
from headrace.core.types.requests.request import Discard, SendTo
from tests.scheduler.bench import Bench, none, only


def start(bench: Bench, trace: int = 1) -> None:
    bench.do(StartTrace(trace=trace))


def end(bench: Bench, trace: int = 1) -> SchedulerTrace:
    return only(bench.do(EndTrace(trace=trace)), Traced).scheduler


def by_request(trace: SchedulerTrace) -> dict[str, list[PhaseTrace]]:
    rids = {name.request: name.rid for name in trace.names}
    found: dict[str, list[PhaseTrace]] = defaultdict(list)
    for span in trace.spans:
        found[rids[span.request]].append(span)
    return found


def test_every_stage_is_told_and_passes_its_part_on() -> None:
    bench = Bench(stages=3)
    assert only(bench.do(StartTrace(trace=7)), StartRecording).trace == 7
    effects = bench.do(EndTrace(trace=7))
    assert only(effects, StopRecording).trace == 7
    assert only(effects, Traced).scheduler.stages == 3
    reply = only(bench.do(RecordingStopped(stage=1, trace=7, spans=b"spans")), StageTraced)
    assert reply == StageTraced(trace=7, stage=1, spans=b"spans")


def test_without_a_trace_nothing_is_recorded_or_ordered() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard())
    bench.compute(1)
    assert none(bench.seen, StartRecording)
    assert none(bench.do(EndTrace(trace=1)), Traced)
    start(bench, 1)
    assert none(bench.do(EndTrace(trace=2)), Traced), "another trace's end"
    assert end(bench, 1).spans == ()


def test_phases_of_requests_that_come_and_go_and_stay() -> None:
    bench = Bench()
    bench.join()
    bench.submit("before", 10, route=SendTo("t"))
    bench.wait(1)
    start(bench)
    began = bench.now
    bench.wait(1)
    bench.reserve()
    bench.submit("during", 40, route=Discard())
    bench.wait(1)
    first = bench.plan()
    assert first is not None
    bench.wait(1)
    bench.done(first, 5)
    bench.wait(1)
    bench.abort("during")
    trace = end(bench)
    assert (trace.started, trace.ended) == (began, bench.now)
    phases = by_request(trace)
    assert [(span.phase, span.then, span.end - span.start) for span in phases["before"]] == [
        ("bootstrap", "waiting", 2), ("waiting", "running", 1), ("running", "inflight", 1), ("inflight", "", 1),
    ]  # fmt: skip
    assert [(span.phase, span.then) for span in phases["during"]] == [("waiting", "running"), ("running", "failed")]
    for spans in phases.values():
        assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    names = {name.rid: (name.ticket, name.peer) for name in trace.names}
    assert names == {"before": ("t", "peer"), "during": ("", "")}


def test_counts_are_noted_when_they_change() -> None:
    bench = Bench()
    bench.submit("old", 10, route=Discard())
    old = bench.plan()
    assert old is not None
    start(bench)
    bench.wait(1)
    bench.submit("new", 20, route=Discard(), cache_salt="n")
    bench.wait(1)
    assert bench.plan() is not None
    assert bench.plan() is None, "no credit is left"
    bench.wait(1)
    bench.done(old, 1)
    trace = end(bench)
    waiting, running = (trace.phases.index(phase) for phase in ("waiting", "running"))
    began = trace.started
    seen = [
        (load.at - began, load.in_flight, load.issued, load.queues[waiting], load.queues[running], load.unplanned)
        for load in trace.loads
    ]
    assert seen == [(0, 1, 0, 0, 1, 0), (1, 1, 0, 1, 1, 20), (2, 2, 1, 0, 2, 4), (3, 1, 1, 0, 1, 4)]


def test_a_preempted_request_is_known_by_all_its_serials() -> None:
    bench = Bench(kv_pages=8, max_model_len=64)
    start(bench)
    bench.submit("a", 15, max_tokens=17, cache_salt="a")
    bench.submit("b", 15, max_tokens=17, cache_salt="b")
    tokens = iter(range(1000))
    serials = defaultdict(set)
    while not bench.scheduler.idle:
        forward = bench.plan()
        assert forward is not None
        for row in forward.rows:
            serials[row.request].add(row.start)
        bench.done(forward, *[next(tokens) for row in forward.rows if row.sample is not None])
    assert bench.metric("preemptions_total") > 0
    trace = end(bench)
    named = {name.serial: name.rid for name in trace.names}
    assert set(serials) <= set(named)
    assert len(named) > 2
    assert set(named.values()) == {"a", "b"}
    phases = [span.phase for span in by_request(trace)["b"]]
    assert phases == ["waiting", "running", "generating", "waiting", "running", "generating"]


def test_a_group_that_comes_up_again_records_too() -> None:
    bench = Bench(stages=2)
    start(bench)
    bench.do(StageFailed(stage=0, message=""))
    bench.seen.clear()
    bench.up()
    assert bench.one(StartRecording).trace == 1
    assert end(bench).stages == 2


@pytest.mark.parametrize("loaded", [0, 1])
def test_a_server_without_stages_traces_the_scheduler_alone(loaded: int) -> None:
    bench = Bench(up=False, stages=2)
    if loaded:
        one = Bench(up=False, stages=1)
        one.scheduler = bench.scheduler
        one.up()
    assert none(bench.do(StartTrace(trace=1)), StartRecording), "orders go to whole groups"
    effects = bench.do(EndTrace(trace=1))
    assert none(effects, StopRecording)
    trace = only(effects, Traced).scheduler
    assert (trace.stages, len(trace.loads)) == (0, 1)


def test_a_new_trace_takes_the_place_of_one_that_was_not_ended() -> None:
    bench = Bench()
    start(bench, 1)
    bench.submit("a", 10, route=Discard())
    bench.compute(1)
    start(bench, 2)
    assert bench.metric("dropped_messages_total", "unknown_trace") == 0
    assert none(bench.do(EndTrace(trace=1)), Traced)
    assert bench.metric("dropped_messages_total", "unknown_trace") == 1
    assert end(bench, 2).spans == ()
