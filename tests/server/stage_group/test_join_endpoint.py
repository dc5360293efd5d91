"""The join endpoint: external stages join over the order socket, and events count from members only."""

import random
from collections.abc import Iterator, Sequence

import pytest
import zmq

from headrace.core.messages.membership import (
    AnyJoinReply,
    GroupEnded,
    JoinAccepted,
    JoinPending,
    JoinProgress,
    JoinRefused,
    JoinRequest,
)
from headrace.core.messages.orders import AnyOrder, BeginEpoch, stage_identity
from headrace.core.messages.replies import StageDown
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageFailed, StageHeartbeat, StageReady
from headrace.core.runtime.codec import Codec
from headrace.core.stats import Stats
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch.stage_channel import ChannelEvent, StageChannel
from headrace.server.launch.stage_connections import ZmqRouter, bound_port, order_socket
from headrace.server.stage_group.join_endpoint import REPLY_BURST, JoinEndpoint
from headrace.transfer.sockets.connections import Connections
from tests.server.stage_group.test_registry import join, make_registry

Socket = zmq.Socket[bytes]
GEOMETRY = Geometry("float32", 1, 1, 2, 16)
JOINS: Codec[JoinRequest] = Codec(JoinRequest)
REPLIES: Codec[AnyJoinReply] = Codec(AnyJoinReply)
ORDERS: Codec[AnyOrder] = Codec(AnyOrder)
EVENTS: Codec[AnyStageEvent] = Codec(AnyStageEvent)
SILENCE_S = 0.6


class Bench:
    """A stage channel with a join endpoint on a real TCP socket, and a clock set by the test."""

    def __init__(self, context: "zmq.Context[Socket]", start_timeout_s: float = 60.0) -> None:
        self.context = context
        connections = Connections(context, "stages", 64)
        socket = order_socket(context, "tcp://127.0.0.1:*", connections.watch, SILENCE_S)
        self.endpoint = f"tcp://127.0.0.1:{bound_port(socket)}"
        self.poller = socket
        endpoint = JoinEndpoint(socket, make_registry(key="k"), start_timeout_s)
        router = ZmqRouter(socket, connections)
        self.channel = StageChannel(router, Layout(pp=2), heartbeat_s=1.0, silence_s=3.0, join_endpoint=endpoint)
        self.sockets: list[Socket] = []

    def connect(self, identity: bytes | None = None) -> Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = 5000
        if identity is not None:
            socket.routing_id = identity
        socket.connect(self.endpoint)
        self.sockets.append(socket)
        return socket

    def receive(self, now: float = 0.0) -> Sequence[ChannelEvent]:
        assert self.poller.poll(5000)
        return self.channel.receive(now)

    def join(
        self, socket: Socket, message: JoinRequest, now: float = 0.0
    ) -> tuple[AnyJoinReply, Sequence[ChannelEvent]]:
        socket.send(JOINS.encode(message))
        events = self.receive(now)
        return REPLIES.decode(socket.recv()), events

    def complete(self, now: float = 0.0) -> tuple[list[Socket], str]:
        """Two admitted stages, and the session of their group."""
        members = [self.connect(), self.connect()]
        self.join(members[0], join(0, key="k"), now)
        reply, _ = self.join(members[1], join(1, key="k"), now)
        assert isinstance(reply, JoinAccepted)
        assert isinstance(REPLIES.decode(members[0].recv()), JoinAccepted)
        return members, reply.config.session


@pytest.fixture
def context() -> Iterator["zmq.Context[Socket]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def bench(context: "zmq.Context[Socket]") -> Iterator[Bench]:
    made = Bench(context)
    yield made
    for socket in made.sockets:
        socket.close()
    made.channel.close()


def ready(stage: int, epoch: int = 1) -> StageReady:
    return StageReady(
        stage=stage, geometry=GEOMETRY, fingerprint="", data_port=1, kv_pages=4, vocab_size=9, epoch=epoch
    )


def test_stages_join_and_the_scheduler_hears_of_the_progress(bench: Bench) -> None:
    events = bench.channel.tick(0.0)
    assert events == [JoinProgress(message="waiting for stages 0 and 1 of 2 to join at tcp://here:1")]
    first, second = bench.connect(), bench.connect()
    reply, events = bench.join(first, join(0))
    assert isinstance(reply, JoinRefused)
    assert events == []
    reply, events = bench.join(first, join(0, key="k"))
    assert isinstance(reply, JoinPending)
    assert events == [JoinProgress(message="waiting for stage 1 of 2 to join at tcp://here:1")]
    reply, events = bench.join(second, join(1, key="k"))
    assert isinstance(reply, JoinAccepted)
    assert isinstance(REPLIES.decode(first.recv()), JoinAccepted), "sent without another JoinRequest"
    assert events == [JoinProgress(message="all 2 stages have joined and are loading")]
    session = reply.config.session
    orders = [bench.connect(stage_identity(stage, 1, session)) for stage in (0, 1)]
    for stage, socket in enumerate(orders):
        socket.send(EVENTS.encode(ready(stage)))
        assert bench.receive() == [ready(stage)]
    assert bench.channel.all_ready() == (ready(0), ready(1))
    bench.channel.apply(BeginEpoch(seq=7, epoch=1), 0.0)
    assert [ORDERS.decode(socket.recv()) for socket in orders] == [BeginEpoch(seq=7, epoch=1)] * 2


def test_garbage_and_forged_routing_ids_change_nothing(bench: Bench) -> None:
    _, session = bench.complete()
    members = [bench.connect(stage_identity(stage, 1, session)) for stage in (0, 1)]
    for stage, socket in enumerate(members):
        socket.send(EVENTS.encode(ready(stage)))
        bench.receive()
    random.seed(5)
    done = PlanDone(stage=1, seq=1, duration_s=1.0)
    frames = (b"", random.randbytes(300), EVENTS.encode(ready(0, epoch=9)), EVENTS.encode(done))
    names = (None, stage_identity(0, 1), stage_identity(1, 1, "guessed"), stage_identity(0, 2, session))
    for name in names:
        stranger = bench.connect(name)
        for frame in frames:
            stranger.send(frame)
            assert bench.receive() == []
        stranger.send_multipart([JOINS.encode(join(0, key="k")), b"more"])
        assert bench.receive() == []
    assert bench.channel.all_ready() == (ready(0), ready(1))
    samples = {(sample.name, sample.labels): sample.value for sample in bench.channel.statistics().samples}
    assert samples["malformed_frames_total", ("stages",)] == 5 * len(names)


def test_a_member_whose_process_exits_is_reported_at_a_heartbeat(bench: Bench) -> None:
    members, _ = bench.complete()
    assert bench.channel.tick(1.0) == []
    members[1].close()
    now, events = 2.0, bench.channel.tick(2.0)
    while not events:  # until libzmq has seen the end of the connection
        assert now < 400
        bench.poller.poll(20)
        now += 1.0
        events = bench.channel.tick(now)
    assert [event.stage for event in events if isinstance(event, StageFailed)] == [1]
    members[0].recv()
    events = bench.channel.stage_down(StageDown(stage=1, message="gone", epoch=1))
    assert events == [
        JoinProgress(message="stage 1 failed: gone; waiting for stages 0 and 1 of 2 to join at tcp://here:1")
    ]
    replies = []
    while not replies or not isinstance(replies[-1], GroupEnded):
        replies.append(REPLIES.decode(members[0].recv()))
    assert replies[-1].message == "stage 1 failed: gone"


def test_a_process_that_joins_without_end_is_answered_a_few_times(bench: Bench) -> None:
    loud = bench.connect()
    sent = 5 * int(REPLY_BURST)
    for _ in range(sent):
        loud.send(JOINS.encode(join(0, key="wrong")))
    refused = 0.0
    while refused < sent:
        bench.receive()
        refused = sum(each.value for each in bench.channel.statistics().samples if each.name == "refusals_total")
    answers = 0
    while loud.poll(200):
        assert isinstance(REPLIES.decode(loud.recv()), JoinRefused)
        answers += 1
    assert answers == REPLY_BURST
    assert isinstance(bench.join(bench.connect(), join(0, key="k"))[0], JoinPending)
    assert isinstance(bench.join(loud, join(0, key="wrong"), now=1.0)[0], JoinRefused), (
        "a second later it may ask again"
    )


def test_a_stage_that_takes_too_long_to_load_fails(context: "zmq.Context[Socket]") -> None:
    bench = Bench(context, start_timeout_s=10.0)
    _, session = bench.complete(now=100.0)
    loaded = bench.connect(stage_identity(0, 1, session))
    loaded.send(EVENTS.encode(ready(0)))
    bench.receive(105.0)
    for now in (107.0, 109.0):
        assert bench.channel.tick(now) == []
        loaded.send(EVENTS.encode(StageHeartbeat(stage=0, stats=Stats())))
        assert bench.receive(now) == []
    assert bench.channel.tick(110.1) == [StageFailed(stage=1, message="it took more than 10 s to load")]
    for socket in bench.sockets:
        socket.close()
    bench.channel.close()
