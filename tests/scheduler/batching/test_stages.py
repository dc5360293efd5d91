"""Stages that fail or fall silent, and the engine that comes up again."""

import pytest
from msgspec.structs import replace

from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import (
    AdmitPeer,
    BeginEpoch,
    DropPeer,
    Forward,
    OpenSession,
    Order,
    ReleaseRequest,
    SendChunk,
)
from headrace.core.messages.peers import AskCancel, EndPeer, PeerCancelled, PeerGone, TellCancelled, TellFailed
from headrace.core.messages.replies import EngineState, RequestFailed, StageDown
from headrace.core.messages.stage_events import PlanDone, StageFailed, StageLoading, StageReady
from headrace.core.types.requests.request import Discard, FetchFrom, SendTo
from tests.scheduler.bench import Bench, geometry, none, only


def test_a_plan_that_times_out_fails_the_stage_that_did_not_report_it() -> None:
    bench = Bench(stages=2)
    bench.submit("a", 40)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    bench.wait(100)
    bench.done(first, stage=0)
    bench.done(first)
    bench.wait(100)
    assert bench.ended() == 0, "each plan has its own time"
    bench.done(second, stage=0)
    bench.wait(30)
    error = bench.error()
    assert (error.code, error.status, error.stage) == ("stage_failed", 503, 1)
    assert bench.last(EngineState).ready is False
    assert "stage 1" in bench.last(EngineState).reason
    bench.assert_empty()


def test_a_failed_stage_fails_every_request_and_the_pool_starts_over() -> None:
    bench = Bench()
    bench.join()
    bench.prefill_up()
    bench.submit("warm", 10, route=Discard())
    bench.compute(1)
    assert bench.metric("kv_pages", "cached") == 2
    bench.submit("out", 10, route=SendTo("t"))
    bench.reserve()
    bench.compute(1)
    bench.submit("in", 10, route=FetchFrom("p", "u"), cache_salt="in")
    bench.expecting(3)
    bench.submit("here", 40, cache_salt="h")
    bench.plan()
    bench.abort("here")
    effects = bench.do(StageFailed(stage=0, message="out of memory"))
    assert {failed.rid for failed in effects if isinstance(failed, RequestFailed)} == {"out", "in"}
    told = [type(effect) for effect in effects if isinstance(effect, EngineState | RequestFailed)]
    assert told[0] is EngineState, "a client with its answer finds the server not ready"
    assert only(effects, TellFailed).error.code == "stage_failed"
    only(effects, AskCancel)
    assert none(effects, ReleaseRequest)
    assert bench.metric("kv_pages", "free") == 64
    bench.assert_empty()
    bench.submit("b")
    assert bench.error("b").code == "not_ready"
    down = StageDown(stage=0, message="again", epoch=0)
    assert bench.do(StageFailed(stage=0, message="again")) == [bench.last(EngineState), down]
    bench.seen.clear()
    bench.up()
    assert bench.one(EngineState).ready
    bench.one(AdmitPeer)
    bench.one(OpenSession)
    bench.submit("c", 10, route=Discard())
    forward = bench.plan()
    assert forward is not None
    assert forward.rows[0].start == 0, "the old tree is gone"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_failure_of_another_server_does_not_count_as_one_of_this_group(elsewhere: bool) -> None:
    """StageDown.served keeps the supervisor from counting the restart."""
    bench = Bench()
    bench.do(StageFailed(stage=0, message="gone", elsewhere=elsewhere))
    assert bench.last(StageDown) == StageDown(stage=0, message="gone", epoch=0, served=elsewhere)


def test_nothing_is_ordered_before_all_stages_are_ready_and_their_stream_begins() -> None:
    bench = Bench(stages=2)
    assert bench.one(BeginEpoch) == BeginEpoch(seq=1, epoch=0)
    bench.join()
    bench.prefill_up()
    bench.submit("a", route=Discard())
    bench.plan()
    bench.do(StageFailed(stage=1, message=""))
    bench.seen.clear()
    one = Bench(up=False)
    one.scheduler = bench.scheduler
    one.join("later")
    one.prefill_up("p2")
    one.up()
    one.plan()
    assert one.all(Order) == [], "one of two is ready"
    bench.up()
    assert [type(order) for order in bench.all(Order)] == [BeginEpoch, AdmitPeer, AdmitPeer, OpenSession]


def test_reports_of_the_old_engine_are_dropped() -> None:
    bench = Bench()
    bench.submit("a")
    old = bench.plan()
    assert old is not None
    bench.do(StageFailed(stage=0, message=""))
    bench.up()
    bench.submit("b")
    new = bench.plan()
    assert new is not None
    bench.done(old, 5)
    assert bench.metric("dropped_messages_total", "unknown_plan") == 1
    assert bench.tokens("b") == []
    bench.done(new, 6)
    assert bench.tokens("b") == [6]


def test_a_stage_that_restarts_on_its_own_fails_the_engine() -> None:
    bench = Bench()
    bench.submit("a")
    bench.plan()
    bench.up()
    assert bench.error().code == "stage_failed"
    assert bench.last(EngineState).ready
    bench.submit("b")
    assert isinstance(bench.plan(), Forward)


def test_stages_that_are_gathering_are_the_reason_that_is_announced() -> None:
    bench = Bench(up=False)
    bench.do(JoinProgress(message="waiting for stage 0"))
    assert bench.last(EngineState) == EngineState(ready=False, reason="waiting for stage 0")
    bench.up()
    assert bench.do(JoinProgress(message="loading")) == [], "of no interest while all are up"
    assert bench.last(EngineState).ready


def test_stages_with_different_models_are_no_engine() -> None:
    bench = Bench(up=False, stages=2)
    one = StageReady(stage=0, geometry=geometry(4), fingerprint="f", data_port=1, kv_pages=64, vocab_size=9, epoch=1)
    bench.do(one)
    bench.do(replace(one, stage=1, fingerprint="g"))
    assert not bench.last(EngineState).ready
    assert "another one than that of stage 0" in bench.last(StageDown).message
    for stage in (0, 1):
        bench.do(replace(one, stage=stage, epoch=2))
    assert bench.last(EngineState).ready


def test_all_stages_have_to_come_up_again() -> None:
    bench = Bench(stages=2)
    bench.do(StageFailed(stage=1, message=""))
    one = Bench(up=False, stages=1)
    one.scheduler = bench.scheduler
    one.up()
    bench.submit("a")
    assert bench.error().code == "not_ready"


def cancelled(**changes: object) -> Bench:
    """The peer has taken back a ticket whose bytes are on the way."""
    bench = Bench(**changes)  # type: ignore[arg-type]
    bench.join()
    bench.submit("a", route=SendTo("t"))
    bench.reserve()
    bench.compute(1)
    bench.do(PeerCancelled(session="s", ticket="t", generation=1, reason=""))
    return bench


def test_a_stage_that_does_not_answer_a_cancel_is_failed() -> None:
    bench = cancelled(stages=2)
    bench.quiet(1, 0)
    effects = bench.wait(11)
    assert only(effects, EndPeer).session == "s", "the peer may be what the stage waits for"
    bench.do(PeerGone(session="s", reason=""))
    assert none(bench.wait(119), EngineState)
    effects = bench.wait(2)
    state = only(effects, EngineState)
    assert "stage 1" in state.reason
    assert none(bench.seen, TellCancelled), "it is not certain that no byte follows"
    bench.assert_empty()


@pytest.mark.parametrize("stage_timeout_s", [5, 120])
def test_a_peer_that_does_not_read_ends_its_own_session_and_no_engine(stage_timeout_s: float) -> None:
    """The stage is quiet once it has closed the peer's connections, however long the peer held them up."""
    bench = cancelled(stage_timeout_s=stage_timeout_s)
    bench.join("other")
    effects = bench.wait(11)
    assert only(effects, EndPeer).reason == "the decode peer acknowledged nothing for 10 s"
    effects += bench.do(PeerGone(session="s", reason=""))
    assert only(effects, DropPeer).session == "s"
    effects += bench.wait(stage_timeout_s - 1)
    effects += bench.quiet(1)
    only(effects, ReleaseRequest)
    assert none(effects, StageDown)
    assert none(bench.seen, TellCancelled), "it has been told that its session is over"
    bench.assert_empty()
    bench.submit("b", 10, route=SendTo("u"), cache_salt="b")
    bench.reserve("u", session="other")
    bench.compute(1)
    bench.ack(bench.last(SendChunk))
    assert bench.finished("b")


def test_a_cancelled_send_may_wait_while_the_peer_takes_in_what_was_sent_before() -> None:
    bench = cancelled()
    bench.submit("b", 10, route=SendTo("u"), cache_salt="b")
    bench.reserve("u")
    bench.compute(1)
    bench.wait(8)
    bench.ack(bench.last(SendChunk))
    assert none(bench.wait(9), EndPeer)
    only(bench.wait(2), EndPeer)


def test_stages_of_which_the_peer_acknowledges_everything_do_not_excuse_the_others() -> None:
    bench = cancelled(stages=2)
    bench.quiet(1, 0)
    bench.submit("b", 10, route=SendTo("u"), cache_salt="b")
    bench.reserve("u")
    bench.compute(1)
    bench.wait(8)
    bench.ack(bench.last(SendChunk), 0)
    only(bench.wait(3), EndPeer)


def test_a_peer_that_says_goodbye_leaves_a_waiting_stage_its_own_time() -> None:
    bench = cancelled()
    bench.wait(9)
    bench.do(PeerGone(session="s", reason="goodbye"))
    effects = bench.wait(119)
    assert none(effects, StageDown)
    only(bench.quiet(1), ReleaseRequest)
    bench.assert_empty()


def test_a_late_report_of_an_earlier_stage_is_harmless() -> None:
    bench = Bench(stages=2)
    bench.submit("a", 4, route=Discard())
    forward = bench.plan()
    assert forward is not None
    bench.done(forward, 1)
    assert bench.do(PlanDone(stage=0, seq=forward.seq, duration_s=0.1)) == []
    assert bench.metric("dropped_messages_total", "unknown_plan") == 0


def test_stages_that_load_say_how_far_they_are_until_all_are_up() -> None:
    bench = Bench(up=False, stages=2)
    gib = 1 << 30
    bench.do(StageLoading(stage=1, done_bytes=gib, total_bytes=4 * gib, left_s=6.2))
    bench.do(StageLoading(stage=0, loaded=True))
    reasons = [state.reason for state in bench.all(EngineState)]
    assert reasons == [
        "stage 1 reads weights: 1.0 of 4.0 GiB (25%, 6 s left)",
        "stage 0 warms up; stage 1 reads weights: 1.0 of 4.0 GiB (25%, 6 s left)",
    ]
    bench.do(bench.ready(0))
    bench.do(StageLoading(stage=1, loaded=True))
    assert bench.last(EngineState) == EngineState(ready=False, reason="stage 1 warms up")
    bench.do(bench.ready(1))
    assert bench.last(EngineState) == EngineState(ready=True)
    bench.do(StageLoading(stage=1, loaded=True))
    assert bench.last(EngineState).ready, "late news"


def test_why_stages_load_again_is_said_until_they_are_up() -> None:
    bench = Bench()
    bench.do(StageFailed(stage=0, message="out of memory"))
    failure = bench.last(EngineState).reason
    assert "out of memory" in failure
    bench.do(StageLoading(stage=0, epoch=1, loaded=True))
    assert bench.last(EngineState).reason == f"{failure}; stage 0 warms up"
    bench.do(replace(bench.ready(0), epoch=1))
    bench.do(StageFailed(stage=0, message="again"))
    assert "out of memory" not in bench.last(EngineState).reason
