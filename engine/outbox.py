"""Events from the threads of a stage to its I/O thread; on a GPU a plan is reported when the device is done with it.

    CPU: compute thread ──QueuedPlan──► EventOutbox ──ComputedPlan──► I/O thread
    GPU: compute thread ──QueuedPlan, CUDA events──► DeviceOutbox, waits for them ──► EventOutbox ──► I/O thread

A plan on a GPU is only queued when the compute thread is through with it. Its end is that of its work on the device:
then its pages can be read, its tokens and its seconds are known, and one more plan may be ordered.
"""

import contextlib
import logging
import queue
import threading
from typing import NamedTuple, Protocol

import msgspec
import torch
import zmq

from headrace.core.messages.orders import ShutdownStage
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageFailed
from headrace.engine.row_sampler import Sampling
from headrace.engine.telemetry.meter import Meter, PlanRun

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1 << 16  # entries in each queue between the threads; credits bound the plans, so a full queue is a bug
ITEMS_PER_PASS = 256
CLOSE_S = 5.0


class ComputedPlan(NamedTuple):
    """A plan that is done."""

    run: PlanRun  # when each of its steps began
    done: PlanDone  # to be reported


class QueuedPlan(NamedTuple):
    """A plan that the compute thread is through with."""

    run: PlanRun
    stage: int
    seconds: float
    """That it took, of the host's clock, or of a GPU's where that is known."""
    sampling: Sampling | None = None
    """On the last stage."""

    def computed(self) -> ComputedPlan:
        """The plan with its result; waits for that."""
        done = PlanDone(stage=self.stage, seq=self.run.plan.seq, duration_s=self.seconds)
        if self.sampling is not None:
            result = self.sampling.result()
            done = msgspec.structs.replace(
                done,
                samples=tuple(result.samples),
                prompt_logprobs=tuple(result.prompt_logprobs),
                nonfinite=tuple(result.nonfinite),
                rejected=result.rejected,
                hidden=result.hidden,
            )
        return ComputedPlan(self.run, done)


OutboxItem = AnyStageEvent | ComputedPlan | ShutdownStage


class PlanOutbox(Protocol):
    """Where the compute thread reports to."""

    def begin(self) -> None:
        """The work of a plan begins: what is queued from now on is its own."""
        ...

    def post(self, item: OutboxItem | QueuedPlan) -> None:
        """Report an item behind those before it; a plan when its work is done. Raises queue.Full."""
        ...


class EventOutbox:
    """Queue from another thread (compute or copy) to the I/O thread: bounded, with a socket pair that wakes the I/O
    thread's poller."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """context: of the stage; both sockets are in-process."""
        self._items: queue.Queue[OutboxItem] = queue.Queue(QUEUE_LIMIT)
        endpoint = f"inproc://outbox-{id(self)}"
        self.reader = context.socket(zmq.PAIR)  # used by the I/O thread
        self.reader.set_hwm(0)  # the queue bounds the number of wake-up frames
        self.reader.bind(endpoint)
        self._writer = context.socket(zmq.PAIR)  # used by the other thread
        self._writer.set_hwm(0)
        self._writer.connect(endpoint)

    def begin(self) -> None:
        """See PlanOutbox. Nothing: a plan that is posted is done."""

    def post(self, item: OutboxItem | QueuedPlan) -> None:
        """Queue an item and wake the I/O thread. By one other thread only. Raises queue.Full."""
        self._items.put_nowait(item.computed() if isinstance(item, QueuedPlan) else item)
        with contextlib.suppress(zmq.Again):  # the I/O thread has ended
            self._writer.send(b"", zmq.NOBLOCK)

    def drain(self) -> list[OutboxItem]:
        """Return up to ITEMS_PER_PASS queued items. I/O thread only. Takes one wake-up frame per item, so that the
        reader stays readable while items are left."""
        items: list[OutboxItem] = []
        while len(items) < ITEMS_PER_PASS:
            try:
                self.reader.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            items.append(self._items.get_nowait())
        return items

    def close(self) -> None:
        """Close both sockets of an outbox that no thread uses yet."""
        self.reader.close()
        self._writer.close()

    def close_writer(self) -> None:
        """Close the other thread's socket, by that thread or after its end."""
        self._writer.close()


class _Queued(NamedTuple):
    """An item, and the events around a plan's work on the device."""

    item: OutboxItem | QueuedPlan
    begun: "torch.cuda.Event | None" = None
    ended: "torch.cuda.Event | None" = None


class DeviceOutbox(threading.Thread):
    """A PlanOutbox for a GPU: a thread that runs until close()."""

    def __init__(self, outbox: EventOutbox, device: torch.device, meter: Meter) -> None:
        """outbox: posted to by this thread alone. device: its current stream has the work of plans. meter: is told
        seconds of the device."""
        super().__init__(name="plan-ends", daemon=True)
        self._outbox = outbox
        self._device = device
        self._meter = meter
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._begun: torch.cuda.Event | None = None
        self.start()

    def begin(self) -> None:
        """See PlanOutbox. Used by the compute thread, as post() and close()."""
        self._begun = self._recorded()

    def post(self, item: OutboxItem | QueuedPlan) -> None:
        """See PlanOutbox."""
        if isinstance(item, QueuedPlan):
            self._queue.put(_Queued(item, self._begun, self._recorded()))
        else:
            self._queue.put(_Queued(item))

    def close(self) -> None:
        """Post what is left, and end; waits some seconds for a device that works."""
        self._queue.put(None)
        self.join(CLOSE_S)

    def run(self) -> None:
        """Post items in their order, plans when the device has come to their ends."""
        try:
            while (queued := self._queue.get()) is not None:
                self._outbox.post(self._when_done(queued))
        except Exception as error:  # most are of the device
            log.exception("plans of this stage cannot be reported")
            self._outbox.post(StageFailed(stage=self._meter.stage, message=f"the device has failed: {error}"))
            self._outbox.post(ShutdownStage(seq=0))

    def _when_done(self, queued: _Queued) -> OutboxItem | QueuedPlan:
        item, begun, ended = queued
        if not isinstance(item, QueuedPlan) or begun is None or ended is None:
            return item
        ended.synchronize()
        seconds = begun.elapsed_time(ended) / 1e3
        return item._replace(run=self._meter.device_done(item.run, seconds), seconds=seconds)

    def _recorded(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
