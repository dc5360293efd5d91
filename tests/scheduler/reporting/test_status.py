"""What the scheduler says of itself for GET /status."""

import pytest

from headrace.core.messages.frontend import QueryStatus
from headrace.core.messages.peers import PeerGone
from headrace.core.messages.replies import StatusReply
from headrace.core.messages.stage_events import PlanDone
from headrace.core.status import SchedulerStatus, StageSpans
from headrace.core.types.requests.request import Discard, SendTo
from headrace.scheduler.reporting import status as status_module
from headrace.scheduler.telemetry.plan_log import MAX_SPANS, SHORT_S, WATCHED_S, WINDOW_S, PlanLog
from tests.scheduler.bench import Bench, only


def look(bench: Bench, requests: int = 10) -> SchedulerStatus:
    reply = only(bench.do(QueryStatus(token=3, requests=requests)), StatusReply)
    assert reply.token == 3
    return reply.status


def spans_of(status: SchedulerStatus) -> dict[int, int]:
    """Plans by rank."""
    return {stage.rank: sum(span.plans for span in stage.spans) for stage in status.stages}


def test_requests_are_listed_with_age_and_progress() -> None:
    bench = Bench(policy="fcfs")
    bench.submit("first", 30, route=Discard())
    bench.wait(2)
    bench.submit("second", 12, route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.wait(1)
    bench.done(forward)
    status = look(bench)
    by_rid = {request.rid: request for request in status.requests}
    first, second = by_rid["first"], by_rid["second"]
    assert [(request.prompt_tokens, request.age_s) for request in (first, second)] == [(30, 3.0), (12, 1.0)]
    assert (first.phase, first.computed_tokens, first.phase_s) == ("running", 16, 1.0)
    assert (second.phase, second.computed_tokens) == ("waiting", 0)
    assert {load.phase: load.requests for load in status.phases if load.requests} == {"running": 1, "waiting": 1}
    assert sum(load.tokens for load in status.phases) == 42


def test_requests_at_work_come_before_those_that_wait_and_the_list_is_bounded() -> None:
    bench = Bench(max_running=1, policy="fcfs")
    for number in range(5):
        bench.submit(f"r{number}", 40, route=Discard())
    bench.plan()
    assert [request.rid for request in look(bench, 3).requests] == ["r0", "r1", "r2"]
    assert [request.phase for request in look(bench, 3).requests] == ["running", "waiting", "waiting"]


def test_the_search_for_requests_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "SEARCHED", 20)
    bench = Bench()
    for number in range(30):
        bench.submit(f"r{number}", 2, route=SendTo(f"t{number}"))
    status = look(bench, 100)
    assert [request.rid for request in status.requests] == [f"r{number}" for number in range(20)]
    assert sum(load.requests for load in status.phases) == 30


def test_bounds_are_those_that_refuse_requests() -> None:
    bench = Bench(max_queued_requests=9, max_queued_tokens=100)
    for number in range(3):
        bench.submit(f"r{number}", 20, route=SendTo(f"t{number}"))
    bounds = {bound.name: (bound.queued, bound.limit) for bound in look(bench).bounds}
    assert bounds["requests"] == (3, 9)
    assert bounds["tokens"] == (60, 100)
    assert bounds["seconds"][1] == 0


def test_pages_by_state_add_up() -> None:
    bench = Bench()
    bench.submit("a", 10, route=Discard())
    bench.compute(1)
    bench.submit("b", list(range(100, 120)), route=Discard())
    bench.plan()
    kv = look(bench).kv
    assert kv is not None
    assert kv.leased > 0
    assert kv.cached > 0
    assert (kv.total, kv.free + kv.cached + kv.leased) == (64, 64)


def test_decode_peers_and_their_ends() -> None:
    bench = Bench()
    bench.join("s")
    bench.submit("a", 10, route=SendTo("t"))
    bench.reserve()
    bench.wait(2)
    (peer,) = look(bench).peers
    assert (peer.role, peer.up, peer.requests, peer.joined_s) == ("decode", True, 1, 2.0)
    bench.do(PeerGone(session="s", reason="silent for 3 s"))
    bench.wait(1)
    status = look(bench)
    assert status.peers == ()
    assert [(note.up, note.ago_s) for note in status.notes] == [(False, 1.0), (True, 3.0)]
    assert status.notes[0].text == "silent for 3 s"


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_are_recorded_from_the_first_look_for_as_long_as_it_is_looked_at(stages: int) -> None:
    bench = Bench(stages=stages)

    def work() -> None:
        bench.submit(f"at {bench.now}", 10, route=Discard())
        forward = bench.plan()
        assert forward is not None
        for stage in range(stages - 1):
            bench.do(PlanDone(stage=stage, seq=forward.seq, duration_s=0.004))
        bench.done(forward, 1)

    work()
    assert look(bench).stages == ()
    work()
    assert spans_of(look(bench)) == dict.fromkeys(range(stages), 1)
    bench.wait(WATCHED_S / 2)
    work()
    assert spans_of(look(bench)) == dict.fromkeys(range(stages), 2)
    bench.wait(WATCHED_S + 1)
    work()
    assert look(bench).stages == ()


def log_of(*plans: tuple[float, float]) -> PlanLog:
    """Plans that end at these times and take so long, of rank 0."""
    log = PlanLog(0.0)
    for ended, seconds in plans:
        log.add(0, seconds, ended, 8)
        log.look(ended)
    return log


def test_short_plans_are_one_span_and_long_ones_are_not() -> None:
    (spans,) = log_of((1.0, 0.01), (1.012, 0.01), (1.024, 0.01), (1.5, 0.4), (1.9, 0.4)).look(2.0).values()
    assert [(span.plans, span.tokens) for span in spans] == [(3, 24), (1, 8), (1, 8)]
    assert (spans[0].begun_ms, spans[0].ended_ms, spans[0].busy_ms) == (1010, 976, 30)


def test_the_recording_is_bounded_however_short_plans_are() -> None:
    log, now = PlanLog(0.0), 0.0
    while now < 3 * WINDOW_S:
        now += 0.002
        log.add(0, 0.001, now)
    (spans,) = log.look(now).values()
    assert WINDOW_S / SHORT_S <= len(spans) <= MAX_SPANS
    assert spans[0].begun_ms > 1000 * (WINDOW_S - 2 * SHORT_S), "all of the window"
    assert all(span.ended_ms <= 1000 * WINDOW_S for span in spans)
    assert 0 < spans[-1].begun_ms - spans[-1].ended_ms <= 1000 * SHORT_S
    assert isinstance(StageSpans(0, "stage 0", spans), StageSpans)
