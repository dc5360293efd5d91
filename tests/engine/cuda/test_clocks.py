"""Uses of memory that nothing orders are found, by page and by stream; what the engine does is in order."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor

from headrace.core.messages.orders import Forward, LoadPages, StorePages
from headrace.core.messages.stage_events import PlanDone
from headrace.core.runtime.clock import SystemClock
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_tiers import HOST as HOST_TIER
from headrace.core.types.packed import pack
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.device_pages import BLOCK_BYTES, DevicePages, DeviceRead, DeviceWrite
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.copier import Copier, CopyEvent, CopyOrder
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import DevicePoolPages
from headrace.engine.outbox import ComputedPlan, DeviceOutbox, EventOutbox, PlanOutbox, QueuedPlan
from headrace.engine.telemetry.meter import Meter
from headrace.transfer.protocol.page_store import PageSlice
from tests.engine.cuda.fake_gpu import FakeGpu

GEOMETRY = Geometry("bfloat16", 2, 2, 16, 4)
DEVICE = torch.device("cuda:0")
PAGE = np.zeros((2, 2, 2, 4, 32), np.uint8)
BLOCKS = 4
DEADLINE_MS = 10_000


class Bench:
    """A pool on the device, a plan that writes some of its pages, and copies."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.pool = KVPool(GEOMETRY, 8, "cuda:0")
        gpu.divide(self.pool.tensor, GEOMETRY.page_bytes)
        self.pages = DevicePages(self.pool, BLOCKS * BLOCK_BYTES)
        self.tier = DevicePoolPages(self.pool)
        for pages in (self.pages, self.tier._pages):
            gpu.divide(pages._blocks._memory, BLOCK_BYTES)
        self.side: Any = torch.cuda.Stream(DEVICE)

    def slots(self, pages: Sequence[int]) -> Tensor:
        """Rows of pages in pool.slots."""
        count = len(self.pool.slots) // self.pool.pages
        return place(np.concatenate([np.arange(page * count, (page + 1) * count) for page in pages]), DEVICE)

    def compute(self, *pages: int) -> None:
        """Queue a plan that writes pages."""
        rows = self.slots(pages)
        self.pool.slots.index_copy_(0, rows, torch.ones(len(rows), 16, dtype=torch.bfloat16, device=DEVICE))

    def attend(self, *pages: int) -> None:
        """Queue a plan that reads pages."""
        self.pool.slots.index_select(0, self.slots(pages))

    def copy_out(self, page: int) -> Tensor:
        """Begin a copy of a page to the host."""
        host = torch.empty(self.pool.tensor[page].shape, dtype=torch.bfloat16, pin_memory=True)
        with torch.cuda.stream(self.side):
            host.copy_(self.pool.tensor[page], non_blocking=True)
        return host

    def copy_in(self, page: int) -> None:
        """Begin a copy of a page from the host."""
        host = torch.zeros(self.pool.tensor[page].shape, dtype=torch.bfloat16, pin_memory=True)
        with torch.cuda.stream(self.side):
            self.pool.tensor[page].copy_(host, non_blocking=True)

    def read(self, page: int) -> None:
        """Take the frame of a page."""
        read = self.pages.begin_read([PageSlice(page, 0, 4)])
        assert read is not None
        assert read.done
        read.pages.read(page, 0, 4)

    def write(self, page: int) -> None:
        """Have a page written."""
        self.pages.write(page, 0, 4, PAGE)
        assert self.pages.flush().done

    def store(self, *pages: int) -> None:
        """Have pages read for a tier."""
        for parts in self.tier.read(pages):
            assert parts

    def load(self, page: int) -> None:
        """Have a page written from a tier."""
        self.tier.write(page, PAGE.reshape(-1))
        self.tier.flush()

    def computed(self) -> Any:
        """An event behind all plans that are queued."""
        event: Any = torch.cuda.Event()
        event.record()
        return event


def read_before_its_plan_ends(bench: Bench) -> None:
    bench.compute(3)
    bench.read(3)


def plan_reported_when_it_is_queued(bench: Bench) -> None:
    with Reports(bench, on_device=False) as reports:
        reports.run_plan(3)
        bench.read(3)


def written_while_a_plan_reads(bench: Bench) -> None:
    bench.attend(3)
    bench.write(3)


def read_begun_before_its_plan_ends(bench: Bench) -> None:
    bench.compute(3)
    bench.pages.begin_read([PageSlice(3, 0, 4)])


def computed_again_before_its_read_is_done(bench: Bench) -> None:
    read = bench.pages.begin_read([PageSlice(3, 0, 4)])
    bench.compute(3)
    assert read.done


def frames_taken_before_their_read_is_done(bench: Bench) -> None:
    read = bench.pages.begin_read([PageSlice(2, 0, 4), PageSlice(3, 0, 4)])
    read.pages.read(3, 0, 4)


def attended_to_before_its_write_is_done(bench: Bench) -> None:
    bench.pages.write(3, 0, 4, PAGE)
    bench.pages.flush()
    bench.attend(3)


def block_leased_again_before_its_copy_ends(bench: Bench) -> None:
    for page in range(BLOCKS + 1):
        bench.pages.write(page, 0, 4, PAGE)
        bench.pages.flush()
        bench.pages._writes.clear()


def used_again_before_its_copy_ends(bench: Bench) -> None:
    bench.copy_out(3)
    bench.compute(3)


def read_by_the_host_before_its_copy_ends(bench: Bench) -> None:
    bench.copy_out(3).view(torch.uint8).numpy()


def filled_again_before_its_copy_ends(bench: Bench) -> None:
    bench.copy_out(3).zero_()


def attended_to_before_it_has_come(bench: Bench) -> None:
    bench.copy_in(3)
    bench.attend(3)


def event_recorded_before_the_plan(bench: Bench) -> None:
    event = bench.computed()
    bench.compute(3)
    bench.side.wait_event(event)
    bench.copy_out(3)


def event_of_another_plan(bench: Bench) -> None:
    bench.compute(2)
    event = bench.computed()
    bench.compute(3)
    event.synchronize()
    bench.copy_out(3)


def event_waited_for_by_another_stream(bench: Bench) -> None:
    bench.compute(3)
    other: Any = torch.cuda.Stream(DEVICE)
    other.wait_event(bench.computed())
    bench.copy_out(3)


def two_copies_into_a_page(bench: Bench) -> None:
    bench.copy_in(3)
    bench.write(3)


def tensor_of_another_stream_without_an_event(bench: Bench) -> None:
    with torch.cuda.stream(bench.side):
        made = torch.ones(4, device=DEVICE)
    made.add_(1)


def tensor_of_another_stream_dropped_too_early(bench: Bench) -> None:
    with torch.cuda.stream(bench.side):
        made = torch.ones(4, device=DEVICE)
    torch.cuda.current_stream().wait_stream(bench.side)  # type: ignore[no-untyped-call]
    made + 1


def stored_before_its_plan_ends(bench: Bench) -> None:
    bench.compute(3)
    bench.store(3)


@patch.object(DeviceRead, "wait", lambda _: None)
def stored_before_its_copy_ends(bench: Bench) -> None:
    bench.store(2, 3)


@patch.object(DeviceRead, "wait", lambda _: None)
@patch.object(DevicePoolPages, "_copied", lambda *_: iter(()))
def computed_again_before_it_is_stored(bench: Bench) -> None:
    bench.store(2, 3)
    bench.compute(3)


@patch.object(DeviceWrite, "wait", lambda _: None)
def attended_to_before_it_is_loaded(bench: Bench) -> None:
    bench.load(3)
    bench.attend(3)


def loaded_while_a_plan_reads(bench: Bench) -> None:
    bench.attend(3)
    bench.load(3)


MISTAKES: list[Callable[[Bench], None]] = [
    read_before_its_plan_ends,
    plan_reported_when_it_is_queued,
    written_while_a_plan_reads,
    read_begun_before_its_plan_ends,
    computed_again_before_its_read_is_done,
    frames_taken_before_their_read_is_done,
    attended_to_before_its_write_is_done,
    block_leased_again_before_its_copy_ends,
    used_again_before_its_copy_ends,
    read_by_the_host_before_its_copy_ends,
    filled_again_before_its_copy_ends,
    attended_to_before_it_has_come,
    event_recorded_before_the_plan,
    event_of_another_plan,
    event_waited_for_by_another_stream,
    two_copies_into_a_page,
    tensor_of_another_stream_without_an_event,
    tensor_of_another_stream_dropped_too_early,
    stored_before_its_plan_ends,
    stored_before_its_copy_ends,
    computed_again_before_it_is_stored,
    attended_to_before_it_is_loaded,
    loaded_while_a_plan_reads,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(guard: str, mistake: Callable[[Bench], None]) -> None:
    gpu = FakeGpu(guard)
    with gpu:
        mistake(Bench(gpu))
        assert gpu.races


class Reports:
    """A stage's outbox, and the plans that go through it."""

    def __init__(self, bench: Bench, *, on_device: bool) -> None:
        self._bench = bench
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox = EventOutbox(self._context)
        self._meter = Meter(0, SystemClock())
        self._reports: PlanOutbox = DeviceOutbox(self._outbox, DEVICE, self._meter) if on_device else self._outbox

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._reports, DeviceOutbox):
            self._reports.close()
        self._outbox.close()
        self._context.term()

    def run_plan(self, page: int) -> PlanDone:
        """Compute a page, and wait until the I/O thread would know."""
        plan = Forward(seq=1, rows=())
        self._meter.begin(plan)
        self._meter.mark()
        self._reports.begin()
        self._bench.compute(page)
        self._meter.mark()
        run, seconds = self._meter.end()
        self._reports.post(QueuedPlan(run, 0, seconds))
        assert self._outbox.reader.poll(DEADLINE_MS)
        item = self._outbox.drain()[0]
        assert isinstance(item, ComputedPlan)
        return item.done


def test_pages_of_a_plan_that_has_been_reported_can_be_read(gpu: FakeGpu) -> None:
    with gpu:
        bench = Bench(gpu)
        with Reports(bench, on_device=True) as reports:
            done = reports.run_plan(3)
            assert done.duration_s == 1e-3, "of the device, as its events say"
            bench.compute(4)  # goes on beside the copy
            bench.read(3)
            bench.write(5)
            bench.attend(5)


def run_copier(bench: Bench, *steps: CopyOrder | Callable[[], None]) -> None:
    """Have the copy thread, which is this one, execute orders; what is called is called between them."""
    left = deque(steps)

    def go_on(_: CopyEvent | None = None) -> None:
        while left and callable(left[0]):
            left.popleft()()
        if left:
            copier.submit(left.popleft())
        else:
            copier.close()

    copier = Copier(0, bench.tier, host=HostStore(8, GEOMETRY.page_bytes), disk=None, report=go_on)
    go_on()
    copier.run()
    assert not left


def test_pages_are_free_once_they_are_stored_and_usable_once_they_are_loaded(gpu: FakeGpu) -> None:
    some = pack((2, 3, 5))
    with gpu:
        bench = Bench(gpu)
        with Reports(bench, on_device=True) as reports:
            for page in (2, 3, 5):
                reports.run_plan(page)
            bench.compute(4)  # goes on beside the copies
            run_copier(
                bench,
                StorePages(seq=1, tier=HOST_TIER, sources=some, slots=some),
                lambda: bench.compute(2, 3, 5),
                LoadPages(seq=2, tier=HOST_TIER, slots=some, pages=pack((1, 6, 7))),
                lambda: bench.attend(1, 6, 7),
            )


def test_orders_that_are_kept_are_no_races(gpu: FakeGpu) -> None:
    with gpu:
        bench = Bench(gpu)
        bench.compute(3)
        bench.side.wait_event(bench.computed())
        host = bench.copy_out(3)
        bench.compute(4)
        bench.side.synchronize()
        host.view(torch.uint8).numpy()
        bench.compute(3)
        bench.copy_in(5)
        torch.cuda.current_stream().wait_stream(bench.side)  # type: ignore[no-untyped-call]
        bench.attend(5)
        with torch.cuda.stream(bench.side):
            made = torch.ones(4, device=DEVICE)
        torch.cuda.current_stream().wait_stream(bench.side)  # type: ignore[no-untyped-call]
        made.add_(1)
        made.record_stream(torch.cuda.current_stream())  # type: ignore[no-untyped-call]


def test_indices_from_pageable_memory_make_the_host_wait(gpu: FakeGpu) -> None:
    with gpu, gpu.counted() as counts:
        torch.from_numpy(np.arange(4)).to(DEVICE, non_blocking=True)
        assert counts.syncs.total() == 1
        place(np.arange(4), DEVICE)
        assert counts.syncs.total() == 1
