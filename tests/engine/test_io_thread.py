"""The stage's I/O thread: a stream of orders that is not the one that was sent ends the stage."""

import queue
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import (
    AnyOrder,
    BeginEpoch,
    DropPages,
    DropPeer,
    Forward,
    Heartbeat,
    LoadPages,
    ReleaseRequest,
    ShutdownStage,
    StorePages,
    stage_identity,
)
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    PagesLoaded,
    PagesStored,
    PlanDone,
    StageFailed,
    StageHeartbeat,
)
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.codec import Codec, OrderLog
from headrace.core.runtime.frames import DOOR, ConnectionClosed, make_door
from headrace.core.types import packed
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_tiers import HOST
from headrace.engine.io_thread import Copies, StageIoThread
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.copier import Copier
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import pool_pages
from headrace.engine.orders import Inbox, connect_scheduler
from headrace.engine.outbox import ComputedPlan, EventOutbox
from headrace.engine.telemetry.meter import Meter, PlanRun
from headrace.engine.telemetry.recorder import Recorder
from headrace.server.launch.stage_connections import FrameRouter
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender

GEOMETRY = Geometry("float32", 1, 1, 2, 16)
STAGE = 1
STREAM: list[AnyOrder] = [
    BeginEpoch(seq=1, epoch=0),
    Forward(seq=2, rows=()),
    DropPeer(seq=3, session="s"),
    ReleaseRequest(seq=4, request=1),
    ReleaseRequest(seq=5, request=2),
]


class Bench:
    """A scheduler's order socket, and the I/O thread of one stage. pool: with a host tier of as many pages."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", pool: KVPool | None = None) -> None:
        self._came: list[tuple[bytes, list[bytes]]] = []
        inner, outer = make_door()
        self.router = FrameRouter(inner)
        with outer:
            control = connect_scheduler(context, f"{DOOR}{outer.fileno()}", stage_identity(STAGE))
        store = ArrayPageStore(GEOMETRY, 1)
        transfer = TransferConfig()
        self.inbox: Inbox = queue.Queue()
        self.outbox = EventOutbox(context)
        meter = Meter(STAGE, SystemClock())
        copies = []
        if pool is not None:
            host, copied = HostStore(pool.pages, GEOMETRY.page_bytes), EventOutbox(context)
            copies = [Copies(Copier(STAGE, pool_pages(pool), host=host, disk=None, report=copied.post), copied)]
            copies[0].copier.start()
        self.copies = copies
        self.io_thread = StageIoThread(
            control=control,
            stage=STAGE,
            sender=Sender(transfer, stage=STAGE, geometry=GEOMETRY, store=store, context=context),
            receiver=Receiver(transfer, stage=STAGE, geometry=GEOMETRY, store=store, context=context),
            meter=meter,
            recorder=Recorder(STAGE, meter),
            inbox=self.inbox,
            outbox=self.outbox,
            clock=SystemClock(),
            copies=copies,
        )
        self.io_thread.start()
        self._orders: Codec[AnyOrder] = Codec(AnyOrder)
        self._events: Codec[AnyStageEvent] = Codec(AnyStageEvent)

    def send(self, order: AnyOrder) -> bytes:
        frame = self._orders.encode(order)
        deadline = time.monotonic() + 5
        while True:
            try:
                self.router.send(stage_identity(STAGE), frame)
                return frame
            except ConnectionClosed:  # it has not said its name yet
                assert time.monotonic() < deadline
                self._came += self.router.receive(0.0)

    def hear(self) -> AnyStageEvent:
        deadline = time.monotonic() + 5
        while not self._came:
            assert time.monotonic() < deadline, "the stage says nothing"
            self._came += self.router.receive(0.0)
        return self._events.decode(self._came.pop(0)[1][0])

    def close(self) -> None:
        self.outbox.post(ShutdownStage(seq=0))
        self.io_thread.join(5)
        assert not self.io_thread.is_alive()
        self.outbox.close_writer()
        for each in self.copies:
            each.copier.join(5)
            assert not each.copier.is_alive(), "the copier ends with the I/O thread"
            each.outbox.close_writer()
        self.router.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with zmq.Context() as context:
        made = Bench(context)
        yield made
        made.close()


def test_the_same_orders_are_counted_and_reported(bench: Bench) -> None:
    log = OrderLog()
    for order in STREAM:
        log.add(bench.send(order))
        bench.send(Heartbeat(seq=0, orders=log.count, digest=log.digest))
        answer = bench.hear()
        assert isinstance(answer, StageHeartbeat)
        [count] = [sample.value for sample in answer.stats.samples if sample.name == "stage_orders_total"]
        assert count == log.count


@pytest.mark.parametrize(
    "came",
    [
        pytest.param(STREAM[:-1], id="lost at the end"),
        pytest.param(STREAM[1:], id="lost at the start"),
        pytest.param([*STREAM, STREAM[-1]], id="repeated"),
        pytest.param([*STREAM[:3], STREAM[4], STREAM[3]], id="swapped"),
        pytest.param([*STREAM[:-1], ReleaseRequest(seq=5, request=3)], id="changed"),
    ],
)
def test_other_orders_end_the_stage(bench: Bench, came: list[AnyOrder]) -> None:
    log = OrderLog()
    codec: Codec[AnyOrder] = Codec(AnyOrder)
    for order in STREAM:
        log.add(codec.encode(order))
    for order in came:
        bench.send(order)
    bench.send(Heartbeat(seq=0, orders=log.count, digest=log.digest))
    failure = bench.hear()
    assert isinstance(failure, StageFailed)
    assert f"{len(came)} (" in failure.message
    assert f"{len(STREAM)} (" in failure.message
    orders = [bench.inbox.get(timeout=5) for _ in range(sum(isinstance(o, Forward | ReleaseRequest) for o in came) + 1)]
    assert orders[-1] == ShutdownStage(seq=0), "the compute thread ends, too"


def pages(*numbers: int) -> bytes:
    return packed.pack(numbers)


def test_a_store_waits_for_the_plans_before_it_and_nothing_waits_for_the_store() -> None:
    pool = KVPool(GEOMETRY, 4)
    pool.tensor.zero_()
    with zmq.Context() as context:
        bench = Bench(context, pool)
        bench.send(StorePages(seq=1, tier=HOST, sources=pages(3), slots=pages(3)))
        assert bench.hear() == PagesStored(stage=STAGE, seq=1, written_bytes=GEOMETRY.page_bytes), "no plan before it"
        plans = [Forward(seq=seq, rows=()) for seq in (2, 3)]
        for plan in plans:
            bench.send(plan)
        bench.send(StorePages(seq=4, tier=HOST, sources=pages(0, 1), slots=pages(0, 1)))
        bench.send(Forward(seq=5, rows=()))
        bench.send(LoadPages(seq=6, tier=HOST, slots=pages(3), pages=pages(2)))
        assert bench.hear() == PagesLoaded(stage=STAGE, seq=6)
        pool.tensor[0] = 1.0
        done = [PlanDone(stage=STAGE, seq=plan.seq, duration_s=0.0) for plan in plans]
        bench.outbox.post(ComputedPlan(PlanRun(plans[0], ()), done[0]))
        assert bench.hear() == done[0]
        pool.tensor[1] = 2.0
        bench.outbox.post(ComputedPlan(PlanRun(plans[1], ()), done[1]))
        assert [bench.hear(), bench.hear()] == [
            done[1],
            PagesStored(stage=STAGE, seq=4, written_bytes=2 * GEOMETRY.page_bytes),
        ]
        pool.tensor.zero_()
        bench.send(LoadPages(seq=7, tier=HOST, slots=pages(0, 1), pages=pages(2, 3)))
        assert bench.hear() == PagesLoaded(stage=STAGE, seq=7)
        assert pool.tensor[2].eq(1.0).all()
        assert pool.tensor[3].eq(2.0).all()
        bench.close()


def test_a_copy_thread_that_fails_ends_the_stage() -> None:
    with zmq.Context() as context:
        bench = Bench(context, KVPool(GEOMETRY, 4))
        bench.send(StorePages(seq=1, tier=HOST, sources=pages(9), slots=pages(0)))
        failure = bench.hear()
        assert isinstance(failure, StageFailed)
        assert failure.message == "copy thread: IndexError: page 9 is outside the pool of 4"
        assert bench.inbox.get(timeout=5) == ShutdownStage(seq=0)
        bench.close()


def test_an_order_for_a_tier_that_is_not_there_ends_the_stage(bench: Bench) -> None:
    bench.send(DropPages(seq=1, tier=HOST, slots=pages(0)))
    failure = bench.hear()
    assert isinstance(failure, StageFailed)
    assert "order 1 is for a tier that this stage was not configured with" in failure.message


ORDERS = st.one_of(
    st.builds(lambda seq, request: ReleaseRequest(seq=seq, request=request), st.integers(1, 3), st.integers(0, 300)),
    st.builds(lambda seq, session: DropPeer(seq=seq, session=session), st.integers(1, 3), st.text(max_size=3)),
)


@given(st.lists(ORDERS, max_size=5), st.lists(ORDERS, max_size=5))
def test_logs_agree_when_streams_do(one: list[AnyOrder], other: list[AnyOrder]) -> None:
    codec: Codec[AnyOrder] = Codec(AnyOrder)
    logs = []
    for stream in (one, other, one):
        log = OrderLog()
        for order in stream:
            log.add(codec.encode(order))
        logs.append((log.count, log.digest))
    assert (logs[0] == logs[1]) == (one == other)
    assert logs[0] == logs[2]
