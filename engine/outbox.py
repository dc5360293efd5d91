"""Events from the threads of a stage to its I/O thread; on a GPU a plan is reported when the device is done with it.

    CPU: compute thread ──QueuedPlan──► EventOutbox ──ComputedPlan──► I/O thread
    GPU: compute thread ──QueuedPlan, CUDA events──► DeviceOutbox, waits for them ──► EventOutbox ──► I/O thread

A plan on a GPU is only queued when the compute thread is through with it. Its end is that of its work on the device:
then its pages can be read, its tokens and its seconds are known, and one more plan may be ordered.

Where other GPUs take part in plans, one that is gone shows as an end that does not come. It is waited for so long; then
the group is broken as it is on the CPU, where the operation itself fails: the compute thread gets LinkBroken, and what
is under way on the device is aborted, so that nothing waits for it.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import torch
import zmq

from headrace.core.messages.orders import ShutdownStage
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageFailed
from headrace.core.types.kv.kv_digests import DigestPart
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.collectives.watch import OperationWatch, abort_groups
from headrace.engine.row_sampler import Sampling
from headrace.engine.telemetry.meter import Meter, PlanRun

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1 << 16  # entries in each queue between the threads; credits bound the plans, so a full queue is a bug
ITEMS_PER_PASS = 256
CLOSE_S = 5.0
POLLS_PER_WAIT = 50  # of an event: a plan is known to be done later by this part of its time
SHORTEST_POLL_S, LONGEST_POLL_S = 1e-4, 1e-3
CHECK_S = 0.25  # between looks at whether an operation has failed


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
    digest: tuple[DigestPart, ...] = ()

    def computed(self) -> ComputedPlan:
        """The plan with its result; waits for that."""
        done = PlanDone(stage=self.stage, seq=self.run.plan.seq, duration_s=self.seconds, digest=self.digest)
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


class DeviceLinks(NamedTuple):
    """The links to other GPUs, which plans wait for on the device."""

    watch: OperationWatch
    timeout_s: float
    """That a plan may take from its begin, or from the end of the one before it."""
    broken: Callable[[LinkBroken], object]
    """Is told once, by the thread that waits for the device."""
    abort: Callable[[], None] = abort_groups
    """Ends what is under way; it may take its time."""


class _Queued(NamedTuple):
    """An item, and the events around a plan's work on the device."""

    item: OutboxItem | QueuedPlan
    begun: "torch.cuda.Event | None" = None
    ended: "torch.cuda.Event | None" = None
    since: float = 0.0  # when its work began, in seconds of the monotonic clock


class DeviceOutbox(threading.Thread):
    """A PlanOutbox for a GPU: a thread that runs until close()."""

    def __init__(
        self, outbox: EventOutbox, device: torch.device, meter: Meter, links: DeviceLinks | None = None
    ) -> None:
        """outbox: posted to by this thread alone. device: its current stream has the work of plans. meter: is told
        seconds of the device. links: None where no other GPU takes part in plans."""
        super().__init__(name="plan-ends", daemon=True)
        self._outbox = outbox
        self._device = device
        self._meter = meter
        self._links = links
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._begun: torch.cuda.Event | None = None
        self._since: float | None = None  # when the plan began that is being queued
        self._done = self._checked = 0.0  # when a plan was done, and links were looked at
        self._broken = False
        self.start()

    def begin(self) -> None:
        """See PlanOutbox. Used by the compute thread, as post() and close()."""
        self._begun, self._since = self._recorded(), time.monotonic()

    def post(self, item: OutboxItem | QueuedPlan) -> None:
        """See PlanOutbox."""
        if isinstance(item, QueuedPlan):
            queued = _Queued(item, self._begun, self._recorded(), self._since or 0.0)
            self._since = None
            self._queue.put(queued)
        else:
            self._queue.put(_Queued(item))

    def close(self) -> None:
        """Post what is left, and end; waits some seconds for a device that works."""
        self._queue.put(None)
        self.join(CLOSE_S)

    def run(self) -> None:
        """Post items in their order, plans when the device has come to their ends; none once the links are broken."""
        try:
            while True:
                try:
                    if (queued := self._next()) is None:
                        return
                    item = self._when_done(queued)
                except LinkBroken as error:
                    self._break(error)
                    continue
                if not (self._broken and isinstance(item, QueuedPlan)):
                    self._outbox.post(item)
        except Exception as error:  # most are of the device
            log.exception("plans of this stage cannot be reported")
            self._outbox.post(StageFailed(stage=self._meter.stage, message=f"the device has failed: {error}"))
            self._outbox.post(ShutdownStage(seq=0))

    def _next(self) -> _Queued | None:
        """The next item. Raises LinkBroken where a plan is not even queued in time: it may wait for the device."""
        while True:
            try:
                return self._queue.get(timeout=CHECK_S if self._links is not None and not self._broken else None)
            except queue.Empty:
                if (since := self._since) is not None:
                    run = self._meter.run
                    self._check(f"plan {run.plan.seq}" if run is not None else "a plan", since)

    def _when_done(self, queued: _Queued) -> OutboxItem | QueuedPlan:
        """The item, when the device has come to its end. Raises LinkBroken."""
        item, begun, ended, since = queued
        if not isinstance(item, QueuedPlan) or begun is None or ended is None or self._broken:
            return item
        if self._links is None:
            ended.synchronize()
        else:
            self._poll(ended, f"plan {item.run.plan.seq}", since)
            self._links.watch.drop_done()
        self._done = time.monotonic()
        seconds = begun.elapsed_time(ended) / 1e3
        return item._replace(run=self._meter.device_done(item.run, seconds), seconds=seconds)

    def _poll(self, ended: "torch.cuda.Event", what: str, since: float) -> None:
        """Wait for an event, for so long at most. Raises LinkBroken."""
        started = time.monotonic()
        while not ended.query():  # type: ignore[no-untyped-call]
            waited = time.monotonic() - started
            self._check(what, since)
            time.sleep(min(LONGEST_POLL_S, max(SHORTEST_POLL_S, waited / POLLS_PER_WAIT)))

    def _check(self, what: str, since: float) -> None:
        """Look at the links, now and then. Raises LinkBroken when a plan waits for too long, or for what has failed."""
        links, now = self._links, time.monotonic()
        if links is None or self._broken:
            return
        waited = now - max(since, self._done)
        if now - self._checked < min(CHECK_S, links.timeout_s / 2) and waited < links.timeout_s:
            return
        self._checked = now
        if failure := links.watch.failure():
            raise LinkBroken(f"{what} cannot end: {failure}")
        if waited >= links.timeout_s:
            under_way = ", ".join(links.watch.unfinished()) or "no operation among ranks"
            raise LinkBroken(f"{what} is not done in {links.timeout_s:g} s; under way on the device: {under_way}")

    def _break(self, error: LinkBroken) -> None:
        """Tell the compute thread, and free it where it waits for the device."""
        assert self._links is not None
        self._broken = True
        log.error("%s", error)
        self._links.broken(error)
        threading.Thread(target=self._links.abort, name="abort", daemon=True).start()

    def _recorded(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
