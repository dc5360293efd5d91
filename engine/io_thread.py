"""The stage's I/O thread: orders in, events out, pages to and from peers.

    scheduler ──orders──► ┌──────────┐ ──Forward, ReleaseRequest──► compute thread
              ◄──events── │ I/O      │ ◄──Computed────────────
    peers ◄──── pages ───►│ thread   │
                          └──────────┘

What comes in is logged, so that each Heartbeat can tell whether this stage has had the same orders as the others.

The thread owns every socket of the stage. The compute thread owns the model and talks to it through two bounded
queues. A SendChunk is held here until the Forward that computes its pages is done, and goes out while the next one
runs.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from headrace.core.messages.orders import (
    AdmitPeer,
    AnyOrder,
    BeginEpoch,
    CancelReceive,
    CancelSend,
    CloseSession,
    DropPeer,
    Forward,
    Heartbeat,
    OpenSession,
    PrepareReceive,
    ReleaseRequest,
    SendChunk,
    ShutdownStage,
    StartRecording,
    StopRecording,
)
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageEvent, StageFailed, StageHeartbeat
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.event_loop import MAX_WAIT_S, EventLoop
from headrace.core.runtime.event_source import EventSource
from headrace.core.runtime.frames import UNSENT_WAIT_S, ConnectionClosed
from headrace.core.runtime.order_log import OrderLog
from headrace.core.stats import Sample, Stats, join
from headrace.engine.order_connection import OrderConnection
from headrace.engine.telemetry.meter import Meter, Run
from headrace.engine.telemetry.recorder import Recorder
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1 << 16  # entries between the threads; plans are bounded by credits, so a full queue is a bug
ITEMS_PER_PASS = 256

WirePort = EventSource[StageEvent, Any]


class Computed(NamedTuple):
    """A plan that is done: when it was where, and what to report of it."""

    run: Run
    done: PlanDone


OutboxItem = AnyStageEvent | Computed | ShutdownStage


class EventOutbox:
    """What the compute thread hands to the I/O thread: a bounded queue, and a socket pair that wakes the poller."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._items: queue.Queue[OutboxItem] = queue.Queue(QUEUE_LIMIT)
        endpoint = f"inproc://outbox-{id(self)}"
        self.reader = context.socket(zmq.PAIR)  # the I/O thread's
        self.reader.set_hwm(0)  # the queue is what is bounded
        self.reader.bind(endpoint)
        self._writer = context.socket(zmq.PAIR)  # the compute thread's
        self._writer.set_hwm(0)
        self._writer.connect(endpoint)

    def post(self, item: OutboxItem) -> None:
        """Compute thread only."""
        self._items.put_nowait(item)
        with contextlib.suppress(zmq.Again):  # the I/O thread has ended, and nobody listens any more
            self._writer.send(b"", zmq.NOBLOCK)

    def drain(self) -> list[OutboxItem]:
        """I/O thread only. One wake-up frame is taken per item, so none is left behind."""
        items: list[OutboxItem] = []
        while len(items) < ITEMS_PER_PASS:
            try:
                self.reader.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            items.append(self._items.get_nowait())
        return items

    def close_writer(self) -> None:
        """Compute thread only."""
        self._writer.close()


class OutOfStep(Exception):
    """This stage has not had the orders that the scheduler has sent: it must not go on."""


class StageIoThread(threading.Thread):
    """Runs until ShutdownStage, or until the scheduler cannot be reached any more."""

    def __init__(
        self,
        *,
        control: OrderConnection,
        stage: int,
        sender: Sender,
        receiver: Receiver,
        meter: Meter,
        recorder: Recorder,
        inbox: "queue.Queue[AnyOrder]",
        outbox: EventOutbox,
        clock: Clock,
    ) -> None:
        super().__init__(name="stage-wire", daemon=True)
        self._control = control
        self._stage = stage
        self._sender = sender
        self._receiver = receiver
        self._meter = meter
        self._recorder = recorder
        self._ports: tuple[WirePort, ...] = (sender, receiver)
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._orders: Codec[AnyOrder] = Codec(AnyOrder)
        self._events: Codec[StageEvent] = Codec(AnyStageEvent)
        self._log = OrderLog()
        self._computed = 0  # seq of the newest Forward that is done
        self._held: deque[SendChunk] = deque()  # in stream order, so their Forwards are too
        self._loop = EventLoop(self._ports, zmq.Poller, clock)
        self._running = True

    def run(self) -> None:
        try:
            while self._running:
                self._turn()
        except OutOfStep as error:
            log.error("%s", error)
            self._fail(str(error))
        except ConnectionClosed as error:
            log.debug("the scheduler is gone: %s", error)  # who watches both says why
            self._inbox.put(ShutdownStage(seq=0))
        except Exception as error:
            log.exception("the stage's I/O thread has failed")
            self._fail(f"I/O thread: {error}")
        finally:
            for port in self._ports:
                port.close()
            self._control.close()
            self._outbox.reader.close()

    def _turn(self) -> None:
        longest_s = UNSENT_WAIT_S if self._control.unsent else MAX_WAIT_S
        readable = self._loop.wait([self._control.handle, self._outbox.reader], longest_s=longest_s)
        if self._control.unsent:
            self._control.flush()
        if self._control.handle in readable:
            self._take_orders()
        if self._outbox.reader in readable:
            self._take_results()
        for _, events in self._loop.events():
            self._report(events)

    def _take_orders(self) -> None:
        for frame in self._control.receive():
            order = self._orders.decode(frame)
            if not isinstance(order, Heartbeat):
                self._log.add(frame)
            self._obey(order, self._clock.now())

    def _obey(self, order: AnyOrder, now: float) -> None:
        match order:
            case BeginEpoch():
                pass  # the first of the log
            case Forward():
                self._inbox.put_nowait(order)
            case SendChunk() if order.after > self._computed:
                self._held.append(order)
            case SendChunk() | AdmitPeer() | DropPeer() | CancelSend():
                self._report(self._sender.apply(order, now))
            case ReleaseRequest():
                self._inbox.put_nowait(order)
                self._report(self._sender.apply(order, now))
            case OpenSession() | CloseSession() | PrepareReceive() | CancelReceive():
                self._report(self._receiver.apply(order, now))
            case Heartbeat():
                self._compare(order)
                self._report([StageHeartbeat(stage=self._stage, stats=self._statistics())])
            case StartRecording():
                self._recorder.start(order.trace)
            case StopRecording():
                self._report([self._recorder.report(order.trace, now, self._sender.unanswered(now))])
            case ShutdownStage():
                self._inbox.put_nowait(order)
                self._running = False

    def _compare(self, beat: Heartbeat) -> None:
        log = self._log
        if (log.count, log.digest) != (beat.orders, beat.digest):
            mine, theirs = f"{log.count} ({log.digest.hex()})", f"{beat.orders} ({beat.digest.hex()})"
            raise OutOfStep(f"its orders are not those of the scheduler: {mine} came, {theirs} were sent")

    def _take_results(self) -> None:
        for item in self._outbox.drain():
            match item:
                case ShutdownStage():
                    self._running = False
                case Computed():
                    self._recorder.computed(item.run)
                    self._report([item.done])
                    self._computed = item.done.seq
                    while self._held and self._held[0].after <= self._computed:
                        self._report(self._sender.apply(self._held.popleft(), self._clock.now()))
                case _:
                    self._report([item])

    def _fail(self, message: str) -> None:
        self._report([StageFailed(stage=self._stage, message=message)])
        self._inbox.put(ShutdownStage(seq=0))

    def _report(self, events: Sequence[StageEvent]) -> None:
        for event in events:
            self._control.send(self._events.encode(event))

    def _statistics(self) -> Stats:
        logged = Stats((Sample("stage_orders_total", self._log.count, (str(self._stage),)),))
        return join([logged, *(part.statistics() for part in (self._sender, self._receiver, self._meter))])
