"""The stage's I/O thread: orders in, events out, pages to and from peers.

    scheduler ──orders──► ┌──────────┐ ──Forward, ReleaseRequest──► compute thread
              ◄──events── │   I/O    │ ◄──ComputedPlan─────────────
    peers ◄────pages────► │  thread  │
                          └──────────┘

The I/O thread owns every socket of the stage. The compute thread owns the model; two bounded queues connect them. A
SendChunk is held here until the Forward that computes its pages is done, and is sent while the next one runs. So is a
StorePages of pool pages, until all Forwards before it are done. The copy thread of the host and disk tiers
(kv/tiers/copier.py) takes the orders to copy pages, and has an outbox of its own.

Every order of the stream is counted and hashed (orders.py). A Heartbeat carries the scheduler's count and digest;
a stage whose own differ has lost, repeated or changed an order and fails.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from headrace.core.messages.orders import (
    AdmitPeer,
    AnyOrder,
    BeginEpoch,
    CancelForward,
    CancelReceive,
    CancelSend,
    CloseKvFile,
    CloseSession,
    DropPages,
    DropPeer,
    Forward,
    Heartbeat,
    LoadPages,
    OpenKvFile,
    OpenSession,
    PrepareReceive,
    ReleaseRequest,
    SendChunk,
    ShutdownStage,
    StartRecording,
    StopRecording,
    StorePages,
)
from headrace.core.messages.stage_events import AnyStageEvent, StageEvent, StageFailed, StageHeartbeat
from headrace.core.process_usage import process_usage
from headrace.core.runtime.clock import Clock
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.event_loop import MAX_WAIT_S, EventLoop, EventSource
from headrace.core.runtime.frames import UNSENT_WAIT_S, ConnectionClosed
from headrace.core.runtime.progress import PassProgress
from headrace.core.stats import Sample, Stats, join
from headrace.core.types.kv.kv_tiers import LIBRARY, Tier
from headrace.engine.kv.tiers.copier import Copier, CopyOrder
from headrace.engine.orders import Inbox, OrderCheck, OrderConnection, OrderMismatch
from headrace.engine.outbox import ComputedPlan, EventOutbox
from headrace.engine.telemetry.meter import ExpertMeter, Meter
from headrace.engine.telemetry.recorder import Recorder
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender

log = logging.getLogger(__name__)

DataSocket = EventSource[StageEvent, Any]


class Copies(NamedTuple):
    """A copy thread of a stage, as the I/O thread sees it."""

    copier: Copier
    outbox: EventOutbox
    """The events that it reports."""


class StageIoThread(threading.Thread):
    """The stage's I/O thread. Runs until ShutdownStage, or until the connection to the scheduler is lost."""

    def __init__(
        self,
        *,
        control: OrderConnection,
        stage: int,
        sender: Sender,
        receiver: Receiver,
        meter: Meter,
        recorder: Recorder,
        inbox: Inbox,
        outbox: EventOutbox,
        clock: Clock,
        copies: Sequence[Copies] = (),
        experts: ExpertMeter | None = None,
        progress: PassProgress | None = None,
        replica: int = 0,
    ) -> None:
        """stage: the rank. replica: its data-parallel replica. inbox: orders for the compute thread. outbox: its
        events. copies: of its tiers, apart. experts: None for a stage without experts. progress: of the
        compute thread. The thread takes over control, sender and receiver, and closes them at its end; the copiers end
        with it."""
        super().__init__(name="stage-io", daemon=True)
        self._control = control
        self._stage = stage
        self._sender = sender
        self._receiver = receiver
        self._meter = meter
        self._recorder = recorder
        self._experts = experts
        self._progress = progress or PassProgress()
        self._data_sockets: tuple[DataSocket, ...] = (sender, receiver)
        self._inbox = inbox
        self._copies = copies
        self._outboxes = [outbox, *(each.outbox for each in copies)]
        self._clock = clock
        self._orders: Codec[AnyOrder] = Codec(AnyOrder)
        self._events: Codec[StageEvent] = Codec(AnyStageEvent)
        self._check = OrderCheck(replica)
        self._planned = 0  # seq of the last Forward that was received
        self._computed = 0  # seq of the last Forward that was computed
        self._held: deque[SendChunk] = deque()  # waiting for their Forwards, in stream order
        self._held_stores: deque[tuple[int, StorePages]] = deque()  # each with the seq of the last Forward before it
        self._loop = EventLoop(self._data_sockets, zmq.Poller, clock)
        self._running = True

    def run(self) -> None:
        """Serve the sockets to the end. An error ends the compute thread as well."""
        try:
            while self._running:
                self._turn()
        except OrderMismatch as error:
            log.error("%s", error)
            self._fail(str(error))
        except ConnectionClosed as error:
            log.debug("the scheduler is gone: %s", error)  # the supervisor logs the cause
            self._inbox.put(ShutdownStage(seq=0))
        except Exception as error:
            log.exception("the stage's I/O thread has failed")
            self._fail(f"I/O thread: {error}")
        finally:
            for data_socket in self._data_sockets:
                data_socket.close()
            self._control.close()
            for outbox in self._outboxes:
                outbox.reader.close()
            for each in self._copies:
                each.copier.close()

    def _turn(self) -> None:
        longest_s = UNSENT_WAIT_S if self._control.unsent else MAX_WAIT_S
        handles = [self._control.handle, *(outbox.reader for outbox in self._outboxes)]
        readable = self._loop.wait(handles, longest_s=longest_s)
        if self._control.unsent:
            self._control.flush()
        if self._control.handle in readable:
            self._receive_orders()
        for outbox in self._outboxes:
            if outbox.reader in readable:
                self._drain(outbox)
        for _, events in self._loop.events():
            self._report(events)

    def _receive_orders(self) -> None:
        for frame in self._control.receive():
            order = self._orders.decode(frame)
            if not isinstance(order, Heartbeat):
                self._check.add(frame, order)
            self._obey(order, self._clock.now())

    def _obey(self, order: AnyOrder, now: float) -> None:
        match order:
            case BeginEpoch():  # starts the log
                for each in self._copies:
                    each.copier.submit(order)
            case Forward():
                self._planned = order.seq
                self._inbox.put_nowait(order)
            case CancelForward():
                self._progress.cancel(order.forward)
            case SendChunk() if order.after > self._computed:
                self._held.append(order)
            case SendChunk() | AdmitPeer() | DropPeer() | CancelSend():
                self._report(self._sender.apply(order, now))
            case ReleaseRequest():
                self._inbox.put_nowait(order)
                self._report(self._sender.apply(order, now))
            case OpenSession() | CloseSession() | PrepareReceive() | CancelReceive():
                self._report(self._receiver.apply(order, now))
            case StorePages(from_host=False) if self._planned > self._computed:
                self._held_stores.append((self._planned, order))
            case StorePages() | LoadPages() | DropPages():
                self._copy(order, order.tier)
            case OpenKvFile() | CloseKvFile():
                self._copy(order, LIBRARY)
            case Heartbeat():
                self._check.check(order)
                experts = self._experts.load() if self._experts is not None else None
                stats, steps = self._statistics(), self._progress.steps
                self._report([StageHeartbeat(stage=self._stage, stats=stats, experts=experts, steps=steps)])
            case StartRecording():
                self._recorder.start(order.trace)
            case StopRecording():
                self._report([self._recorder.report(order.trace, now, self._sender.unanswered(now))])
            case ShutdownStage():
                self._inbox.put_nowait(order)
                self._running = False

    def _copy(self, order: CopyOrder, tier: Tier) -> None:
        copier = next((each.copier for each in self._copies if tier in each.copier.slots), None)
        if copier is None:
            raise OrderMismatch(f"order {order.seq} is for a tier that this stage was not configured with")
        copier.submit(order)

    def _drain(self, outbox: EventOutbox) -> None:
        for item in outbox.drain():
            match item:
                case ShutdownStage():
                    self._running = False
                case ComputedPlan():
                    self._recorder.add_plan(item.run)
                    self._report([item.done])
                    self._computed = item.done.seq
                    while self._held and self._held[0].after <= self._computed:
                        self._report(self._sender.apply(self._held.popleft(), self._clock.now()))
                    while self._held_stores and self._held_stores[0][0] <= self._computed:
                        store = self._held_stores.popleft()[1]
                        self._copy(store, store.tier)
                case StageFailed():
                    self._fail(item.message)
                    self._running = False
                case _:
                    self._report([item])

    def _fail(self, message: str) -> None:
        self._report([StageFailed(stage=self._stage, message=message)])
        self._inbox.put(ShutdownStage(seq=0))

    def _report(self, events: Sequence[StageEvent]) -> None:
        for event in events:
            self._control.send(self._events.encode(event))

    def _statistics(self) -> Stats:
        orders = Sample("stage_orders_total", self._check.count, (str(self._stage),))
        logged = Stats((orders, *process_usage(f"rank_{self._stage}")))
        copied = [each.copier.statistics() for each in self._copies]
        experts = [self._experts.statistics()] if self._experts is not None else []
        parts = (part.statistics() for part in (self._sender, self._receiver, self._meter))
        return join([logged, *copied, *experts, *parts])
