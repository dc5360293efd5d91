"""The stage's I/O thread: a stream of orders that is not the one that was sent ends the stage."""

import queue
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from core.clock import SystemClock
from core.codec import Codec
from core.config import TransferConfig
from core.frames import UNIX, OtherEndGone
from core.geometry import Geometry
from core.order_log import OrderLog
from core.orders import (
    Beat,
    Begin,
    DropPeer,
    Forward,
    Halt,
    OrderMessage,
    Release,
    StageBeat,
    StageFailed,
    StageMessage,
    stage_identity,
)
from engine.control import dial_scheduler
from engine.meter import Meter
from engine.recorder import Recorder
from engine.wire import Outbox, StageWire
from server.routers import FrameRouter
from transfer.arrays import ArrayPageStore
from transfer.receiver import Receiver
from transfer.sender import Sender

GEOMETRY = Geometry("float32", 1, 1, 2, 16)
STAGE = 1
STREAM: list[OrderMessage] = [
    Begin(seq=1, epoch=0),
    Forward(seq=2, rows=()),
    DropPeer(seq=3, session="s"),
    Release(seq=4, request=1),
    Release(seq=5, request=2),
]


class Bench:
    """A scheduler's order socket, and one stage's wire on it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: str) -> None:
        self._came: list[tuple[bytes, list[bytes]]] = []
        self.router = FrameRouter(f"{folder}/stages")
        control = dial_scheduler(context, f"{UNIX}{folder}/stages", stage_identity(STAGE))
        store = ArrayPageStore(GEOMETRY, 1)
        transfer = TransferConfig()
        self.inbox: queue.Queue[OrderMessage] = queue.Queue()
        self.outbox = Outbox(context)
        meter = Meter(STAGE, SystemClock())
        self.wire = StageWire(
            control=control,
            stage=STAGE,
            sender=Sender(transfer, stage=STAGE, geometry=GEOMETRY, store=store, context=context),
            receiver=Receiver(transfer, stage=STAGE, geometry=GEOMETRY, store=store, context=context),
            meter=meter,
            recorder=Recorder(STAGE, meter),
            inbox=self.inbox,
            outbox=self.outbox,
            clock=SystemClock(),
        )
        self.wire.start()
        self._orders: Codec[OrderMessage] = Codec(OrderMessage)
        self._events: Codec[StageMessage] = Codec(StageMessage)

    def send(self, order: OrderMessage) -> bytes:
        frame = self._orders.encode(order)
        deadline = time.monotonic() + 5
        while True:
            try:
                self.router.send(stage_identity(STAGE), frame)
                return frame
            except OtherEndGone:  # it has not said its name yet
                assert time.monotonic() < deadline
                self._came += self.router.receive()

    def hear(self) -> StageMessage:
        deadline = time.monotonic() + 5
        while not self._came:
            assert time.monotonic() < deadline, "the stage says nothing"
            self._came += self.router.receive()
        return self._events.decode(self._came.pop(0)[1][0])

    def close(self) -> None:
        self.outbox.post(Halt(seq=0))
        self.wire.join(5)
        assert not self.wire.is_alive()
        self.outbox.close_writer()
        self.router.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with zmq.Context() as context, TemporaryDirectory() as folder:
        made = Bench(context, folder)
        yield made
        made.close()


def test_the_same_orders_are_counted_and_reported(bench: Bench) -> None:
    log = OrderLog()
    for order in STREAM:
        log.add(bench.send(order))
        bench.send(Beat(seq=0, orders=log.count, digest=log.digest))
        beat = bench.hear()
        assert isinstance(beat, StageBeat)
        [count] = [sample.value for sample in beat.stats.samples if sample.name == "stage_orders_total"]
        assert count == log.count


@pytest.mark.parametrize(
    "came",
    [
        pytest.param(STREAM[:-1], id="lost at the end"),
        pytest.param(STREAM[1:], id="lost at the start"),
        pytest.param([*STREAM, STREAM[-1]], id="repeated"),
        pytest.param([*STREAM[:3], STREAM[4], STREAM[3]], id="swapped"),
        pytest.param([*STREAM[:-1], Release(seq=5, request=3)], id="changed"),
    ],
)
def test_other_orders_end_the_stage(bench: Bench, came: list[OrderMessage]) -> None:
    log = OrderLog()
    codec: Codec[OrderMessage] = Codec(OrderMessage)
    for order in STREAM:
        log.add(codec.encode(order))
    for order in came:
        bench.send(order)
    bench.send(Beat(seq=0, orders=log.count, digest=log.digest))
    failure = bench.hear()
    assert isinstance(failure, StageFailed)
    assert f"{len(came)} (" in failure.message
    assert f"{len(STREAM)} (" in failure.message
    orders = [bench.inbox.get(timeout=5) for _ in range(sum(isinstance(o, Forward | Release) for o in came) + 1)]
    assert orders[-1] == Halt(seq=0), "the compute thread ends, too"


ORDERS = st.one_of(
    st.builds(lambda seq, request: Release(seq=seq, request=request), st.integers(1, 3), st.integers(0, 300)),
    st.builds(lambda seq, session: DropPeer(seq=seq, session=session), st.integers(1, 3), st.text(max_size=3)),
)


@given(st.lists(ORDERS, max_size=5), st.lists(ORDERS, max_size=5))
def test_logs_agree_when_streams_do(one: list[OrderMessage], other: list[OrderMessage]) -> None:
    codec: Codec[OrderMessage] = Codec(OrderMessage)
    logs = []
    for stream in (one, other, one):
        log = OrderLog()
        for order in stream:
            log.add(codec.encode(order))
        logs.append((log.count, log.digest))
    assert (logs[0] == logs[1]) == (one == other)
    assert logs[0] == logs[2]
