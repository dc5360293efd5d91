"""StageChannel: orders, heartbeats and events of stages, and restarts of the group."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from headrace.core.messages.orders import (
    AnyOrder,
    BeginEpoch,
    DropPeer,
    Forward,
    Heartbeat,
    ReleaseRequest,
    ReplicaOrder,
    stage_identity,
)
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageHeartbeat, StageLoading, StageReady
from headrace.core.runtime.codec import Codec, OrderLog
from headrace.core.runtime.event_loop import Poll
from headrace.core.runtime.frames import DOOR, make_door
from headrace.core.stats import Stats
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.ranks.coordinate import Agreement
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.ranks.layout import Layout
from headrace.engine.orders import OrderCheck, OrderConnection, connect_scheduler
from headrace.server.launch.stage_channel import ChannelEvent, StageChannel
from headrace.server.launch.stage_connections import FrameRouter, StageRouter, ZmqRouter, order_socket
from headrace.transfer.sockets.connections import Connections

GEOMETRY = Geometry("float32", 1, 1, 2, 16)
EVENTS: Codec[AnyStageEvent] = Codec(AnyStageEvent)
ORDERS: Codec[AnyOrder] = Codec(AnyOrder)


class Ends:
    """A router and the connections of stages to it, through a door or over ZMQ."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: str) -> None:
        self._context = context
        self._stages: list[OrderConnection] = []
        self.router: StageRouter
        inner, self._outer = make_door()
        if kind == "door":
            self._endpoint = f"{DOOR}{self._outer.fileno()}"
            self.router = FrameRouter(inner)
        else:
            inner.close()
            self._endpoint = "inproc://stages"
            connections = Connections(context, "stages", 64)
            self.router = ZmqRouter(order_socket(context, self._endpoint, connections.watch), connections)

    def stage(self, stage: int, epoch: int) -> OrderConnection:
        made = connect_scheduler(self._context, self._endpoint, stage_identity(stage, epoch))
        self._stages.append(made)
        return made

    def close(self) -> None:
        for stage in self._stages:
            stage.close()
        self.router.close()
        self._outer.close()


@pytest.fixture(params=["door", "zmq"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with zmq.Context() as context:
        made = Ends(context, request.param)
        yield made
        made.close()


def send(stage: OrderConnection, message: AnyStageEvent) -> None:
    stage.send(EVENTS.encode(message))


def receive(channel: StageChannel, now: float, count: int) -> list[ChannelEvent]:
    """At least this many events, which have been sent."""
    events: list[ChannelEvent] = []
    deadline = time.monotonic() + 5
    while len(events) < count and time.monotonic() < deadline:
        events += channel.receive(now)
    return [*events, *channel.receive(now)]


def received(stage: OrderConnection) -> list[AnyOrder]:
    """The orders that a stage has received."""
    orders: list[AnyOrder] = []
    while Poll(zmq.Poller).readable([stage.handle], 0.05):
        orders += map(ORDERS.decode, stage.receive())
    return orders


def ready(stage: int, epoch: int) -> StageReady:
    return StageReady(
        stage=stage, geometry=GEOMETRY, fingerprint="", data_port=1, kv_pages=4, vocab_size=9, epoch=epoch
    )


def test_messages_of_the_previous_group_are_ignored(ends: Ends) -> None:
    channel = StageChannel(ends.router, Layout(pp=2), heartbeat_s=1, silence_s=3)
    old = [ends.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        send(socket, ready(stage, 0))
    assert len(receive(channel, 0.0, 2)) == 2
    assert len(channel.all_ready()) == 2
    new = [ends.stage(stage, 1) for stage in (0, 1)]
    send(new[0], ready(0, 1))
    send(old[1], PlanDone(stage=1, seq=5, duration_s=1.0))
    assert receive(channel, 1.0, 1) == [ready(0, 1)]
    assert channel.all_ready() == (), "stage 1 of the previous group does not count"
    send(new[1], ready(1, 1))
    receive(channel, 1.0, 1)
    assert channel.all_ready() == (ready(0, 1), ready(1, 1))
    channel.apply(BeginEpoch(seq=1, epoch=1), 1.0)
    assert [received(socket) for socket in new] == [[BeginEpoch(seq=1, epoch=1)]] * 2
    assert [received(socket) for socket in old] == [[]] * 2


def test_stages_that_load_are_heard_before_their_group_has_begun(ends: Ends) -> None:
    """Also those of the next group, and before the first of it is ready; not those of a group that has ended."""
    channel = StageChannel(ends.router, Layout(pp=1), heartbeat_s=1, silence_s=3)
    first = ends.stage(0, 0)
    send(first, StageLoading(stage=0, epoch=0, done_bytes=1, total_bytes=4))
    assert receive(channel, 0.0, 1) == [StageLoading(stage=0, epoch=0, done_bytes=1, total_bytes=4)]
    assert channel.next_deadline() is None, "no heartbeat is due, and nothing is taken for silent"
    send(first, ready(0, 0))
    assert receive(channel, 0.0, 1) == [ready(0, 0)]
    second = ends.stage(0, 1)
    send(second, StageLoading(stage=0, epoch=1, loaded=True))
    assert receive(channel, 1.0, 1) == [StageLoading(stage=0, epoch=1, loaded=True)]
    assert channel.all_ready() == (ready(0, 0),), "it ends with the first StageReady of the next one"
    send(second, ready(0, 1))
    assert receive(channel, 1.0, 1) == [ready(0, 1)]
    send(first, StageLoading(stage=0, epoch=0))
    assert receive(channel, 1.0, 0) == []


def test_a_silent_stage_fails(ends: Ends) -> None:
    channel = StageChannel(ends.router, Layout(pp=2), heartbeat_s=1, silence_s=3)
    stages = [ends.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(stages):
        send(socket, ready(stage, 0))
    receive(channel, 0.0, 2)
    send(stages[0], PlanDone(stage=0, seq=1, duration_s=1.0))
    receive(channel, 2.0, 1)
    events = [event for second in (1, 2, 3, 4) for event in channel.tick(float(second))]
    assert [event.stage for event in events] == [1]


def test_time_in_which_the_scheduler_was_suspended_is_not_silence_of_a_stage(ends: Ends) -> None:
    """The machine was suspended, or the scheduler process stopped."""
    channel = StageChannel(ends.router, Layout(pp=1), heartbeat_s=1, silence_s=3)
    socket = ends.stage(0, 0)
    send(socket, ready(0, 0))
    receive(channel, 0.0, 1)
    assert not channel.tick(1.0)
    assert not channel.tick(60.0)
    assert [len(channel.tick(second)) for second in (61.0, 62.0)] == [0, 1], "silence counts while the scheduler runs"


def test_the_stream_of_orders_begins_when_all_stages_are_ready(ends: Ends) -> None:
    """Orders decided before BeginEpoch were meant for the previous group and are discarded."""
    channel = StageChannel(ends.router, Layout(pp=2), heartbeat_s=1, silence_s=3)
    old = [ends.stage(stage, 0) for stage in (0, 1)]
    for stage, socket in enumerate(old):
        send(socket, ready(stage, 0))
    receive(channel, 0.0, 2)
    channel.apply(BeginEpoch(seq=1, epoch=0), 0.0)
    new = [ends.stage(stage, 1) for stage in (0, 1)]
    send(new[0], ready(0, 1))
    receive(channel, 1.0, 1)
    channel.apply(ReleaseRequest(seq=2, request=1), 1.0)
    send(new[1], ready(1, 1))
    receive(channel, 1.0, 1)
    channel.apply(ReleaseRequest(seq=3, request=2), 1.0)
    channel.apply(BeginEpoch(seq=4, epoch=1), 1.0)
    stream = [BeginEpoch(seq=4, epoch=1), DropPeer(seq=5, session="s")]
    channel.apply(stream[1], 1.0)
    assert [received(socket) for socket in new] == [stream] * 2
    assert [received(socket) for socket in old] == [[BeginEpoch(seq=1, epoch=0)]] * 2


def test_a_heartbeat_carries_count_and_digest_of_the_orders(ends: Ends) -> None:
    channel = StageChannel(ends.router, Layout(pp=2), heartbeat_s=1, silence_s=3)
    stages = [ends.stage(stage, 0) for stage in (0, 1)]
    send(stages[0], ready(0, 0))
    receive(channel, 0.0, 1)
    channel.tick(1.0)
    send(stages[1], ready(1, 0))
    receive(channel, 1.0, 1)
    log = OrderLog()
    [first] = received(stages[0])
    assert first == Heartbeat(seq=0, orders=0, digest=log.digest)
    for now, order in ((2.0, BeginEpoch(seq=1, epoch=0)), (3.0, ReleaseRequest(seq=2, request=7))):
        channel.apply(order, now)
        channel.tick(now)
        log.add(ORDERS.encode(order))
        for socket in stages:
            assert received(socket) == [order, Heartbeat(seq=0, orders=log.count, digest=log.digest)]


def test_the_load_of_experts_is_that_of_the_latest_heartbeats_of_the_group(ends: Ends) -> None:
    channel = StageChannel(ends.router, Layout(pp=2), heartbeat_s=1, silence_s=3)
    stages = [ends.stage(stage, 0) for stage in (0, 1)]
    load = ExpertLoad(stage=1, layers=(3,), first=0, rows=bytes(16))
    for stage, socket in enumerate(stages):
        send(socket, ready(stage, 0))
    receive(channel, 0.0, 2)
    assert channel.expert_loads() == ()
    send(stages[0], StageHeartbeat(stage=0, stats=Stats()))
    for rows in (bytes(16), bytes([1, *[0] * 15])):
        send(stages[1], StageHeartbeat(stage=1, stats=Stats(), experts=msgspec.structs.replace(load, rows=rows)))
    send(stages[1], PlanDone(stage=1, seq=1, duration_s=1.0))
    receive(channel, 1.0, 1)
    assert [each.matrix() for each in channel.expert_loads()] == [[[1, 0]]]
    send(ends.stage(0, 1), ready(0, 1))
    receive(channel, 2.0, 1)
    assert channel.expert_loads() == (), "the counters of a new group begin anew"


def test_orders_reach_the_ranks_of_their_replica(ends: Ends) -> None:
    """S6: two replicas of two stages; each rank's heartbeat has the count and digest of what it got."""
    layout = Layout(pp=2, dp=2)
    channel = StageChannel(ends.router, layout, heartbeat_s=1, silence_s=3)
    ranks = [ends.stage(rank, 0) for rank in layout.ranks]
    for rank, connection in enumerate(ranks):
        send(connection, ready(rank, 0))
    receive(channel, 0.0, 4)
    agreement = Agreement((0, 0))
    orders = [
        BeginEpoch(seq=1, epoch=0),
        ReplicaOrder(seq=2, replica=1, order=ReleaseRequest(seq=2, request=7)),
        ReplicaOrder(seq=3, replica=0, order=Forward(seq=3, rows=(), agreement=agreement)),
        ReplicaOrder(seq=3, replica=1, order=Forward(seq=3, rows=(), agreement=agreement)),
        DropPeer(seq=4, session="s"),
    ]
    for order in orders:
        assert channel.apply(order, 0.0) == []
    channel.tick(1.5)
    for rank, connection in enumerate(ranks):
        replica = layout.place(rank).replica
        expected = [
            order.order if isinstance(order, ReplicaOrder) else order
            for order in orders
            if not isinstance(order, ReplicaOrder) or order.replica == replica
        ]
        *got, heartbeat = received(connection)
        assert got == expected
        assert isinstance(heartbeat, Heartbeat)
        check = OrderCheck(replica)
        for order in expected:
            check.add(ORDERS.encode(order), order)
        check.check(heartbeat)
        assert heartbeat.passes == 1
    [total] = [sample.value for sample in channel.statistics().samples if sample.name == "orders_total"]
    assert total == len(orders)
