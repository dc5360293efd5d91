"""Stages that do not answer and are not dead: requests wait, peers are not blamed, a long pass is no hang."""

from headrace.core.messages.peers import EndPeer
from headrace.core.messages.replies import EngineState, StageDown
from headrace.core.messages.stage_events import StageProgress, StageSilence
from headrace.core.types.requests.request import SendTo
from tests.scheduler.bench import Bench, none, only

STOPPED = "is stopped (SIGSTOP) for 3.2 s"


def silence(stage: int, reason: str = STOPPED) -> StageSilence:
    return StageSilence(stage=stage, reason=reason)


def test_the_server_is_not_ready_while_a_stage_does_not_answer() -> None:
    bench = Bench(stages=2)
    bench.submit("a")
    assert only(bench.do(silence(1)), EngineState) == EngineState(ready=False, reason=f"stage 1 {STOPPED}")
    both = only(bench.do(silence(0, "has been silent for 4 s")), EngineState)
    assert both.reason == f"stage 0 has been silent for 4 s; stage 1 {STOPPED}"
    assert not only(bench.do(silence(1, "")), EngineState).ready
    assert only(bench.do(silence(0, "")), EngineState) == EngineState(ready=True)
    bench.compute(5)
    assert bench.tokens("a") == [5], "its requests have waited"


def test_a_stage_that_fails_after_all_leaves_nothing_of_its_silence() -> None:
    bench = Bench(stages=2)
    bench.do(silence(1))
    bench.submit("a")
    bench.plan()
    bench.wait(bench.config.stage_timeout_s + 1)
    only(bench.seen, StageDown)
    assert bench.do(silence(1)) == [], "of the group that has ended"
    bench.up()
    assert bench.last(EngineState).ready


def test_a_pass_that_comes_on_is_no_hang() -> None:
    bench = Bench(stages=2)
    bench.submit("a")
    forward = bench.plan()
    assert forward is not None
    for _ in range(5):
        bench.wait(bench.config.stage_timeout_s - 1)
        bench.do(StageProgress(stage=0))
    assert none(bench.seen, StageDown)
    bench.wait(bench.config.stage_timeout_s + 1)
    assert only(bench.seen, StageDown).stage == 0


def test_progress_of_a_stage_is_no_excuse_for_another_one() -> None:
    """Stage 0 has done its part of the oldest plan, and computes the next one: stage 1 hangs."""
    bench = Bench(stages=2)
    bench.submit("a", 40)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    bench.done(first, stage=0)
    for _ in range(3):
        bench.wait(bench.config.stage_timeout_s / 2)
        bench.do(StageProgress(stage=0))
    assert only(bench.seen, StageDown).stage == 1


def test_a_peer_is_not_blamed_for_what_a_stopped_stage_did_not_read() -> None:
    bench = Bench()
    bench.join()
    bench.submit("a", route=SendTo("t"))
    bench.reserve()
    bench.compute(1)
    for _ in range(10):
        bench.wait(3)
        bench.do(silence(0))
    bench.do(silence(0, ""))
    bench.wait(bench.config.transfer_timeout_s - 1)
    assert none(bench.seen, EndPeer), "it has the whole time again"
    bench.wait(2)
    only(bench.seen, EndPeer)
