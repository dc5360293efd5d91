"""The scheduler's end of the connections to stages: stages of different starts are never mixed up."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from headrace.core.messages.orders import (
    AnyOrder,
    AnyStageEvent,
    BeginEpoch,
    DropPeer,
    Heartbeat,
    PlanDone,
    ReleaseRequest,
    StageReady,
    stage_identity,
)
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import UNIX
from headrace.core.runtime.order_log import OrderLog
from headrace.core.runtime.polling import Poll
from headrace.core.types.geometry import Geometry
from headrace.engine.order_connection import OrderConnection, dial_scheduler
from headrace.server.launch.channels import ChannelEvent, StageChannel
from headrace.server.launch.stage_connections import FrameRouter, Router, ZmqRouter, order_socket

GEOMETRY = Geometry("float32", 1, 1, 2, 16)
EVENTS: Codec[AnyStageEvent] = Codec(AnyStageEvent)
ORDERS: Codec[AnyOrder] = Codec(AnyOrder)


class Ways:
    """A scheduler's router and connections to it, of one kind or the other."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]", kind: str) -> None:
        self._context = context
        self._stages: list[OrderConnection] = []
        self.router: Router
        if kind == "unix":
            self._endpoint = f"{UNIX}{folder}/stages"
            self.router = FrameRouter(f"{folder}/stages")
        else:
            self._endpoint = "inproc://stages"
            self.router = ZmqRouter(order_socket(context, self._endpoint))

    def stage(self, stage: int, epoch: int) -> OrderConnection:
        made = dial_scheduler(self._context, self._endpoint, stage_identity(stage, epoch))
        self._stages.append(made)
        return made

    def close(self) -> None:
        for stage in self._stages:
            stage.close()
        self.router.close()


@pytest.fixture(params=["unix", "zmq"])
def ways(request: pytest.FixtureRequest) -> Iterator[Ways]:
    with zmq.Context() as context, TemporaryDirectory() as folder:
        made = Ways(Path(folder), context, request.param)
        yield made
        made.close()


def say(stage: OrderConnection, message: AnyStageEvent) -> None:
    stage.send(EVENTS.encode(message))


def receive(channel: StageChannel, now: float, count: int) -> list[ChannelEvent]:
    """So many events, which have been sent."""
    events: list[ChannelEvent] = []
    deadline = time.monotonic() + 5
    while len(events) < count and time.monotonic() < deadline:
        events += channel.receive(now)
    return [*events, *channel.receive(now)]


def hear(stage: OrderConnection) -> list[AnyOrder]:
    """What has come to a stage."""
    orders: list[AnyOrder] = []
    while Poll(zmq.Poller).readable([stage.handle], 0.05):
        orders += map(ORDERS.decode, stage.receive())
    return orders


def ready(stage: int, epoch: int) -> StageReady:
    return StageReady(
        stage=stage, geometry=GEOMETRY, fingerprint="", data_port=1, kv_pages=4, vocab_size=9, epoch=epoch
    )


def test_a_new_group_is_heard_and_the_old_one_is_not(ways: Ways) -> None:
    channel = StageChannel(ways.router, 2, beat_s=1, silence_s=3)
    old = [ways.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        say(socket, ready(stage, 0))
    assert len(receive(channel, 0.0, 2)) == 2
    assert len(channel.all_ready()) == 2
    new = [ways.stage(stage, 1) for stage in (0, 1)]
    say(new[0], ready(0, 1))
    say(old[1], PlanDone(stage=1, seq=5, duration_s=1.0))
    assert receive(channel, 1.0, 1) == [ready(0, 1)]
    assert channel.all_ready() == (), "the old group's stage 1 does not make it complete"
    say(new[1], ready(1, 1))
    receive(channel, 1.0, 1)
    assert channel.all_ready() == (ready(0, 1), ready(1, 1))
    channel.apply(BeginEpoch(seq=1, epoch=1), 1.0)
    assert [hear(socket) for socket in new] == [[BeginEpoch(seq=1, epoch=1)]] * 2
    assert [hear(socket) for socket in old] == [[]] * 2


def test_a_silent_stage_is_named(ways: Ways) -> None:
    channel = StageChannel(ways.router, 2, beat_s=1, silence_s=3)
    stages = [ways.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(stages):
        say(socket, ready(stage, 0))
    receive(channel, 0.0, 2)
    say(stages[0], PlanDone(stage=0, seq=1, duration_s=1.0))
    receive(channel, 2.0, 1)
    events = [event for second in (1, 2, 3, 4) for event in channel.tick(float(second))]
    assert [event.stage for event in events] == [1]


def test_who_slept_itself_calls_nobody_silent(ways: Ways) -> None:
    """A machine that was suspended, a process that was stopped."""
    channel = StageChannel(ways.router, 1, beat_s=1, silence_s=3)
    socket = ways.stage(0, 0)
    say(socket, ready(0, 0))
    receive(channel, 0.0, 1)
    assert not channel.tick(1.0)
    assert not channel.tick(60.0)
    assert [len(channel.tick(second)) for second in (61.0, 62.0)] == [0, 1], "silence counts while it is awake"


def test_a_stream_begins_when_all_stages_of_the_group_are_ready(ways: Ways) -> None:
    """Whatever the scheduler decided before it had heard of them all was meant for others, and goes to none."""
    channel = StageChannel(ways.router, 2, beat_s=1, silence_s=3)
    old = [ways.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        say(socket, ready(stage, 0))
    receive(channel, 0.0, 2)
    channel.apply(BeginEpoch(seq=1, epoch=0), 0.0)
    new = [ways.stage(stage, 1) for stage in (0, 1)]
    say(new[0], ready(0, 1))
    receive(channel, 1.0, 1)
    channel.apply(ReleaseRequest(seq=2, request=1), 1.0)
    say(new[1], ready(1, 1))
    receive(channel, 1.0, 1)
    channel.apply(ReleaseRequest(seq=3, request=2), 1.0)
    channel.apply(BeginEpoch(seq=4, epoch=1), 1.0)
    stream = [BeginEpoch(seq=4, epoch=1), DropPeer(seq=5, session="s")]
    channel.apply(stream[1], 1.0)
    assert [hear(socket) for socket in new] == [stream] * 2
    assert [hear(socket) for socket in old] == [[BeginEpoch(seq=1, epoch=0)]] * 2


def test_a_heartbeat_tells_what_the_stream_was(ways: Ways) -> None:
    channel = StageChannel(ways.router, 2, beat_s=1, silence_s=3)
    stages = [ways.stage(stage, 0) for stage in (0, 1)]
    say(stages[0], ready(0, 0))
    receive(channel, 0.0, 1)
    channel.tick(1.0)
    say(stages[1], ready(1, 0))
    receive(channel, 1.0, 1)
    log = OrderLog()
    [first] = hear(stages[0])
    assert first == Heartbeat(seq=0, orders=0, digest=log.digest)
    for now, order in ((2.0, BeginEpoch(seq=1, epoch=0)), (3.0, ReleaseRequest(seq=2, request=7))):
        channel.apply(order, now)
        channel.tick(now)
        log.add(ORDERS.encode(order))
        for socket in stages:
            assert hear(socket) == [order, Heartbeat(seq=0, orders=log.count, digest=log.digest)]
