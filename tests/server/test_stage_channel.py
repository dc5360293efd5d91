"""The scheduler's end of the order socket: stages of different starts are never mixed up."""

from collections.abc import Iterator

import pytest
import zmq

from core.codec import Codec
from core.geometry import Geometry
from core.order_log import OrderLog
from core.orders import Beat, Begin, DropPeer, OrderMessage, PlanDone, Release, StageMessage, StageReady, stage_identity
from server.channels import StageChannel, order_socket

ENDPOINT = "inproc://stages"
GEOMETRY = Geometry("float32", 1, 1, 2, 16)
Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator["zmq.Context[Socket]"]:
    with zmq.Context() as context:
        yield context


def stage_socket(context: "zmq.Context[Socket]", stage: int, epoch: int) -> Socket:
    socket = context.socket(zmq.DEALER)
    socket.routing_id = stage_identity(stage, epoch)
    socket.linger = 0
    socket.connect(ENDPOINT)
    return socket


def say(socket: Socket, message: StageMessage) -> None:
    codec: Codec[StageMessage] = Codec(StageMessage)
    socket.send(codec.encode(message))


def hear(socket: Socket) -> list[OrderMessage]:
    """What has come to a stage."""
    codec: Codec[OrderMessage] = Codec(OrderMessage)
    orders: list[OrderMessage] = []
    while socket.poll(50):
        orders.append(codec.decode(socket.recv()))
    return orders


def ready(stage: int, epoch: int) -> StageReady:
    return StageReady(
        stage=stage, geometry=GEOMETRY, fingerprint="", data_port=1, kv_pages=4, vocab_size=9, epoch=epoch
    )


def test_a_new_group_is_heard_and_the_old_one_is_not(context: "zmq.Context[Socket]") -> None:
    channel = StageChannel(order_socket(context, ENDPOINT), 2, beat_s=1, silence_s=3)
    old = [stage_socket(context, stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        say(socket, ready(stage, 0))
    assert len(channel.receive(0.0)) == 2
    assert len(channel.all_ready()) == 2
    new = [stage_socket(context, stage, 1) for stage in (0, 1)]
    say(new[0], ready(0, 1))
    say(old[1], PlanDone(stage=1, seq=5, duration_s=1.0))
    assert channel.receive(1.0) == [ready(0, 1)]
    assert channel.all_ready() == (), "the old group's stage 1 does not make it complete"
    say(new[1], ready(1, 1))
    channel.receive(1.0)
    assert channel.all_ready() == (ready(0, 1), ready(1, 1))
    channel.apply(Begin(seq=1, epoch=1), 1.0)
    assert [hear(socket) for socket in new] == [[Begin(seq=1, epoch=1)]] * 2
    assert [hear(socket) for socket in old] == [[]] * 2
    for socket in (*old, *new):
        socket.close()
    channel.close()


def test_a_silent_stage_is_named(context: "zmq.Context[Socket]") -> None:
    channel = StageChannel(order_socket(context, ENDPOINT), 2, beat_s=1, silence_s=3)
    sockets = [stage_socket(context, stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(sockets):
        say(socket, ready(stage, 0))
    channel.receive(0.0)
    say(sockets[0], PlanDone(stage=0, seq=1, duration_s=1.0))
    channel.receive(2.0)
    events = [event for second in (1, 2, 3, 4) for event in channel.tick(float(second))]
    assert [event.stage for event in events] == [1]
    for socket in sockets:
        socket.close()
    channel.close()


def test_who_slept_itself_calls_nobody_silent(context: "zmq.Context[Socket]") -> None:
    """A machine that was suspended, a process that was stopped."""
    channel = StageChannel(order_socket(context, ENDPOINT), 1, beat_s=1, silence_s=3)
    socket = stage_socket(context, 0, 0)
    say(socket, ready(0, 0))
    channel.receive(0.0)
    assert not channel.tick(1.0)
    assert not channel.tick(60.0)
    assert [len(channel.tick(second)) for second in (61.0, 62.0)] == [0, 1], "silence counts while it is awake"
    socket.close()
    channel.close()


def test_a_stream_begins_when_all_stages_of_the_group_are_ready(context: "zmq.Context[Socket]") -> None:
    """Whatever the scheduler decided before it had heard of them all was meant for others, and goes to none."""
    channel = StageChannel(order_socket(context, ENDPOINT), 2, beat_s=1, silence_s=3)
    old = [stage_socket(context, stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        say(socket, ready(stage, 0))
    channel.receive(0.0)
    channel.apply(Begin(seq=1, epoch=0), 0.0)
    new = [stage_socket(context, stage, 1) for stage in (0, 1)]
    say(new[0], ready(0, 1))
    channel.receive(1.0)
    channel.apply(Release(seq=2, request=1), 1.0)
    say(new[1], ready(1, 1))
    channel.receive(1.0)
    channel.apply(Release(seq=3, request=2), 1.0)
    channel.apply(Begin(seq=4, epoch=1), 1.0)
    stream = [Begin(seq=4, epoch=1), DropPeer(seq=5, session="s")]
    channel.apply(stream[1], 1.0)
    assert [hear(socket) for socket in new] == [stream] * 2
    assert [hear(socket) for socket in old] == [[Begin(seq=1, epoch=0)]] * 2
    for socket in (*old, *new):
        socket.close()
    channel.close()


def test_a_heartbeat_tells_what_the_stream_was(context: "zmq.Context[Socket]") -> None:
    channel = StageChannel(order_socket(context, ENDPOINT), 2, beat_s=1, silence_s=3)
    sockets = [stage_socket(context, stage, 0) for stage in (0, 1)]
    say(sockets[0], ready(0, 0))
    channel.receive(0.0)
    channel.tick(0.0)
    say(sockets[1], ready(1, 0))
    channel.receive(0.0)
    log = OrderLog()
    [first] = hear(sockets[0])
    assert first == Beat(seq=0, orders=0, digest=log.digest)
    codec: Codec[OrderMessage] = Codec(OrderMessage)
    for order in (Begin(seq=1, epoch=0), Release(seq=2, request=7)):
        channel.apply(order, 0.0)
        channel.tick(0.0)
        log.add(codec.encode(order))
        for socket in sockets:
            assert hear(socket) == [order, Beat(seq=0, orders=log.count, digest=log.digest)]
    for socket in sockets:
        socket.close()
    channel.close()
