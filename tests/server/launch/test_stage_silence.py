"""Stages that do not answer: which of them are dead, which are waited for, and what is said of them. Virtual time."""

import os
from collections.abc import Iterator

import pytest

from headrace.core.messages.orders import stage_identity
from headrace.core.messages.stage_events import PlanDone, StageFailed, StageHeartbeat, StageProgress, StageSilence
from headrace.core.runtime.frames import FrameSocket, connect, make_door
from headrace.core.runtime.liveness import Activity
from headrace.core.stats import Stats
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch.stage_channel import ChannelEvent, StageChannel
from headrace.server.launch.stage_connections import FrameRouter
from tests.server.launch.test_stage_channel import EVENTS, ready

SILENCE_S, HANG_S = 3.0, 20.0


class Bench:
    """A channel to one stage, which is up at second 0. activity: what its process does."""

    def __init__(self) -> None:
        self.activity: Activity | None = Activity(0.0, 0.0)
        self.looked_at: set[int] = set()
        inner, outer = make_door()
        self.router = FrameRouter(inner)
        self.channel = StageChannel(
            self.router, Layout(pp=1), heartbeat_s=1.0, silence_s=SILENCE_S, hang_s=HANG_S, inspect=self.inspect
        )
        with outer:
            self.stage: FrameSocket = connect(outer)
        self.stage.send(stage_identity(0, 0))
        self.say(ready(0, 0), 0.0)

    def inspect(self, pid: int) -> Activity | None:
        self.looked_at.add(pid)
        return self.activity

    def say(self, event: object, now: float) -> list[ChannelEvent]:
        self.stage.send(EVENTS.encode(event))  # type: ignore[arg-type]
        return [*self.channel.receive(now), *self.channel.receive(now)]  # the first one may accept the connection

    def until(self, first: float, last: float) -> list[ChannelEvent]:
        """Let time pass, deadline by deadline."""
        events: list[ChannelEvent] = []
        while (at := self.channel.next_deadline()) is not None and at <= last:
            events += self.channel.tick(max(first, at))
        return events


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stage.close()
    made.channel.close()


def test_a_stage_that_could_answer_and_does_not_is_dead_after_the_silence(bench: Bench) -> None:
    *_, failed = bench.until(0.0, 10.0)
    assert isinstance(failed, StageFailed)
    assert failed.message.startswith("stage 0 has been silent for ")
    assert bench.channel.all_ready() == ()


@pytest.mark.parametrize(
    "activity",
    [Activity(0.0, 0.0, stopped=True), Activity(0.0, 0.0, runnable=True), Activity(0.0, 0.0, disk=True)],
    ids=["stopped", "runnable", "disk"],
)
def test_a_stage_that_cannot_answer_is_waited_for_up_to_the_bound(bench: Bench, activity: Activity) -> None:
    bench.activity = activity
    events = bench.until(0.0, HANG_S)
    assert events
    assert all(isinstance(event, StageSilence) and event.reason for event in events)
    (failed,) = [event for event in bench.until(HANG_S, HANG_S + 3) if isinstance(event, StageFailed)]
    assert failed.stage == 0


def test_a_stopped_stage_is_reported_at_once_and_when_it_goes_on(bench: Bench) -> None:
    bench.activity = Activity(0.0, 0.0, stopped=True)
    first, *_ = bench.until(0.0, 4.0)
    assert isinstance(first, StageSilence)
    assert first.reason == "is stopped (SIGSTOP) for 0.2 s"
    assert len(bench.looked_at) == 1
    assert bench.say(StageHeartbeat(stage=0, stats=Stats()), 4.5) == [StageSilence(stage=0, reason="")]
    assert [sample.labels for sample in bench.channel.statistics().samples if "silences" in sample.name] == [
        ("0", "stopped")
    ]
    bench.activity = Activity(0.0, 0.0)
    assert bench.until(4.5, 7.0) == [], "it has the whole time again"


def test_a_busy_stage_is_reported_only_when_it_would_count_as_dead(bench: Bench) -> None:
    bench.activity = Activity(0.0, 0.0, runnable=True)
    assert bench.until(0.0, SILENCE_S) == []
    (event, *_) = bench.until(SILENCE_S, 2 * SILENCE_S)
    assert isinstance(event, StageSilence)
    assert "the machine is overloaded, run delay" in event.reason


def test_a_stage_that_answers_is_not_looked_at(bench: Bench) -> None:
    for second in range(1, 10):
        assert bench.until(second, second) == []
        bench.say(StageHeartbeat(stage=0, stats=Stats()), second + 0.1)
        assert bench.until(second + 0.25, second + 0.5) == []
    assert not bench.looked_at


def test_a_heartbeat_tells_whether_the_compute_thread_has_come_on(bench: Bench) -> None:
    assert bench.say(StageHeartbeat(stage=0, stats=Stats(), steps=7), 1.0) == [StageProgress(stage=0)]
    assert bench.say(StageHeartbeat(stage=0, stats=Stats(), steps=7), 2.0) == []
    assert bench.say(StageHeartbeat(stage=0, stats=Stats(), steps=8), 3.0) == [StageProgress(stage=0)]
    done = PlanDone(stage=0, seq=1, duration_s=1.0)
    assert bench.say(done, 4.0) == [done]


def test_the_process_at_the_other_end_of_a_connection() -> None:
    inner, outer = make_door()
    router = FrameRouter(inner)
    with outer:
        stage = connect(outer)
    stage.send(b"name")
    stage.send(b"hello")
    while not list(router.receive(0.0)):
        pass
    assert router.pid(b"name") == os.getpid()
    assert router.pid(b"other") is None
    stage.close()
    router.close()
