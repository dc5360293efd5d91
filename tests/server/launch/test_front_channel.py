"""The scheduler's end of the channel to the front end: what it adds to what the scheduler says."""

import socket
from collections.abc import Iterator

import pytest

from headrace.core.messages.frontend import AnyFrontendRequest, StageLost
from headrace.core.messages.replies import AnySchedulerReply, EngineState, ServerInfo, StageDown, StagePools, StatsReply
from headrace.core.messages.stage_events import StageFailed, StageReady
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import FrameSocket
from headrace.core.stats import Sample, Stats
from headrace.core.types.kv.geometry import CacheShape, Component, Geometry
from headrace.server.launch.front_channel import FrontChannel, FrontEndGone

REPLIES: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
REQUESTS: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
FAILED = StageFailed(stage=1, message="told")


class OtherPort:
    """A port with counters of its own."""

    def statistics(self) -> Stats:
        return Stats((Sample("orders_total", 3),))


class FrontEnd:
    """The front end's end of a channel, and the channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.frames = FrameSocket(ours)
        self.channel = FrontChannel(
            FrameSocket(theirs),
            instance="i",
            control_port=5,
            on_stage_down=lambda _down: [FAILED],
            stats_sources=[OtherPort()],
        )

    def heard(self) -> list[AnySchedulerReply]:
        return [REPLIES.decode(frame) for frame in self.frames.receive()]


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    made.frames.close()
    made.channel.close()


def stage(index: int, kv_pages: int) -> StageReady:
    return StageReady(
        stage=index,
        epoch=0,
        fingerprint="fp",
        geometry=Geometry("float32", 1, 1, 2, 16),
        kv_pages=kv_pages,
        data_host="10.0.0.1",
        data_port=7000 + index,
        vocab_size=9,
    )


def test_the_front_end_learns_who_this_server_is_before_it_is_ready(front: FrontEnd) -> None:
    assert front.heard() == [ServerInfo(instance="i", control_port=5)]
    front.channel.stages_ready([stage(0, 9), stage(1, 7)])
    front.channel.apply(EngineState(ready=True), 0.0)
    pools = StagePools(
        fingerprint="fp",
        kv_pages=7,
        data_endpoints=("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001"),
        data_ranks=(0, 1),
        cache=CacheShape("float32", 1, 1, 2),
        tensors=(Component("kv", "float32", 1, 1, 2),),
    )
    assert front.heard() == [ServerInfo(instance="i", control_port=5, stages=pools), EngineState(ready=True)]


def test_statistics_are_those_of_all_ports(front: FrontEnd) -> None:
    front.heard()
    front.channel.apply(StatsReply(token=1, stats=Stats((Sample("queue_requests", 2),))), 0.0)
    (reply,) = front.heard()
    assert isinstance(reply, StatsReply)
    assert [(sample.name, sample.value) for sample in reply.stats.samples] == [
        ("queue_requests", 2),
        ("orders_total", 3),
    ]


def test_a_stage_that_is_down_is_reported_to_the_stages_too(front: FrontEnd) -> None:
    down = StageDown(stage=1, message="silent", epoch=0)
    assert front.channel.apply(down, 0.0) == [FAILED]
    assert front.heard()[-1] == down


def test_what_the_supervisor_and_a_gone_front_end_mean_to_the_scheduler(front: FrontEnd) -> None:
    front.frames.send(REQUESTS.encode(StageLost(stage=0, message="status 1")))
    assert front.channel.receive(0.0) == [StageFailed(stage=0, message="status 1")]
    front.frames.close()
    with pytest.raises(FrontEndGone):
        front.channel.receive(0.0)
