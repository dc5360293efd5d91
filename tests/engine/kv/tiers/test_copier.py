"""The copy thread: what it answers to each order, in which order, and what it does about pages that fail."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.core.messages.orders import BeginEpoch, DropPages, LoadPages, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesLost, PagesStored, StageFailed
from headrace.core.types import packed
from headrace.core.types.kv.kv_tiers import DISK, HOST, Tier
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers import copier as copier_module
from headrace.engine.kv.tiers.copier import Copier, CopyEvent, CopyOrder
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import Parts, pool_pages
from tests.engine.kv.tiers.pages import GEOMETRY, PAGE, RECORD, disk, header, page

PAGES = 40
STAGE = 1


class Bench:
    """A copier with its pool, whose answers are awaited."""

    def __init__(self, folder: Path | None, host_pages: int = PAGES, host: HostStore | None = None) -> None:
        self.pool = KVPool(GEOMETRY, PAGES)
        self.host = host or (HostStore(host_pages, PAGE) if host_pages else None)
        self.disk: DiskStore | None = disk(folder) if folder else None
        self._events: queue.Queue[CopyEvent] = queue.Queue()
        self.copier = Copier(STAGE, pool_pages(self.pool), host=self.host, disk=self.disk, report=self._events.put)
        self.fill()
        self.copier.start()

    def fill(self, seed: int = 0) -> None:
        assert self.pool.rows is not None
        for index in range(PAGES):
            self.pool.rows[index] = page(seed + index)

    def send(self, *orders: CopyOrder) -> None:
        for order in orders:
            self.copier.submit(order)

    def answer(self) -> CopyEvent:
        return self._events.get(timeout=10)

    def ask(self, order: CopyOrder) -> CopyEvent:
        self.copier.submit(order)
        return self.answer()

    def holds(self, pages: range, seed: int = 0) -> bool:
        assert self.pool.rows is not None
        return all((self.pool.rows[index] == page(seed + index)).all() for index in pages)

    def close(self) -> None:
        self.copier.close()
        self.copier.join(10)
        assert not self.copier.is_alive()
        assert self._events.empty()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def store(tier: Tier, sources: range, slots: range, seq: int = 1, from_host: bool = False) -> StorePages:
    headers = tuple(header(source) for source in sources) if tier == DISK else ()
    return StorePages(
        seq=seq,
        tier=tier,
        sources=packed.pack(sources),
        slots=packed.pack(slots),
        from_host=from_host,
        headers=headers,
    )


def load(tier: Tier, slots: range, pages: range, seq: int = 2) -> LoadPages:
    return LoadPages(seq=seq, tier=tier, slots=packed.pack(slots), pages=packed.pack(pages))


def failed(*indices: int) -> bytes:
    return packed.pack(indices)


@pytest.mark.parametrize(("tier", "size"), [(HOST, PAGE), (DISK, RECORD)])
def test_pages_are_stored_and_loaded_elsewhere(bench: Bench, tier: Tier, size: int) -> None:
    stored = bench.ask(store(tier, range(10, 18), range(8)))
    assert stored == PagesStored(stage=STAGE, seq=1, written_bytes=8 * size)
    bench.pool.tensor.fill_(float("nan"))
    assert bench.ask(load(tier, range(2, 8), range(12, 18))) == PagesLoaded(stage=STAGE, seq=2)
    assert bench.holds(range(12, 18))
    assert torch.isnan(bench.pool.tensor[18:]).all()
    assert torch.isnan(bench.pool.tensor[:12]).all(), "no other page"


def test_pages_go_from_host_to_disk(bench: Bench) -> None:
    bench.ask(store(HOST, range(10), range(20, 30)))
    demoted = bench.ask(store(DISK, range(20, 30), range(10), seq=3, from_host=True))
    assert demoted == PagesStored(stage=STAGE, seq=3, written_bytes=10 * RECORD)
    bench.send(DropPages(seq=4, tier=HOST, slots=packed.pack(range(20, 30))))
    bench.pool.tensor.fill_(float("nan"))
    assert bench.ask(load(DISK, range(10), range(10))) == PagesLoaded(stage=STAGE, seq=2)
    assert bench.holds(range(10))
    lost = bench.ask(load(HOST, range(20, 22), range(2)))
    assert lost == PagesLoaded(stage=STAGE, seq=2, failed=failed(0, 1)), "dropped"
    assert bench.holds(range(10)), "pages of failed loads are as they were"


def test_a_changed_page_fails_alone_where_it_is_loaded_or_demoted(bench: Bench) -> None:
    assert bench.host is not None
    bench.ask(store(HOST, range(4), range(4)))
    bench.host.get(2)[7] ^= 1
    bench.pool.tensor.fill_(float("nan"))
    assert bench.ask(load(HOST, range(4), range(4))) == PagesLoaded(stage=STAGE, seq=2, failed=failed(2))
    assert bench.holds(range(2))
    assert bench.holds(range(3, 4))
    assert torch.isnan(bench.pool.tensor[2]).all()
    demoted = bench.ask(store(DISK, range(4), range(4), seq=3, from_host=True))
    assert demoted == PagesStored(stage=STAGE, seq=3, failed=failed(2), written_bytes=3 * RECORD)
    counts = {sample.labels: sample.value for sample in bench.copier.statistics().samples}
    assert counts["1", HOST, "load", "checksum"] == 1
    assert counts["1", DISK, "store", "checksum"] == 1


def test_slots_that_had_to_go_are_reported(bench: Bench) -> None:
    """28 slots in 32 records: the second writing of the first twelve needs the first segment's room."""
    bench.ask(store(DISK, range(28), range(28)))
    bench.send(store(DISK, range(5), range(5), seq=5))
    assert isinstance(bench.answer(), PagesStored)
    gone = bench.answer()
    assert isinstance(gone, PagesLost)
    assert gone.tier == DISK
    slots = packed.unpack(gone.slots).tolist()
    assert slots
    bench.pool.tensor.fill_(0)
    result = bench.ask(load(DISK, range(28), range(28)))
    assert isinstance(result, PagesLoaded)
    assert packed.unpack(result.failed).tolist() == sorted(slots)


def test_what_is_on_disk_is_reported_once_the_group_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "FOUND_PER_EVENT", 4)
    first = Bench(tmp_path)
    assert first.ask(BeginEpoch(seq=1, epoch=0)) == PagesFound(stage=STAGE, slots=b"", headers=())
    first.ask(store(DISK, range(10), range(10)))
    first.close()
    again = Bench(tmp_path)
    again.send(BeginEpoch(seq=1, epoch=1))
    parts = [again.answer() for _ in range(3)]
    assert [part.last for part in parts if isinstance(part, PagesFound)] == [False, False, True]
    found = {
        slot: name
        for part in parts
        if isinstance(part, PagesFound)
        for slot, name in zip(packed.unpack(part.slots), part.headers, strict=True)
    }
    assert found == {slot: header(slot) for slot in range(10)}
    again.pool.tensor.fill_(0)
    assert again.ask(load(DISK, range(10), range(10))) == PagesLoaded(stage=STAGE, seq=2)
    assert again.holds(range(10))
    again.close()


def test_a_stage_without_a_disk_has_found_nothing_to_report() -> None:
    bench = Bench(None)
    bench.send(BeginEpoch(seq=1, epoch=0))
    assert isinstance(bench.ask(store(HOST, range(1), range(1))), PagesStored)
    assert bench.copier.slots == {HOST: PAGES}
    bench.close()


class GatedStore(HostStore):
    """A host tier whose puts wait, one by one, until they may go on."""

    def __init__(self, slots: int, page_bytes: int) -> None:
        super().__init__(slots, page_bytes)
        self.reached = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def put(self, slot: int, page: Parts, header: object = None) -> int:
        self.reached.release()
        assert self.go_on.acquire(timeout=10)
        return super().put(slot, page)


def test_a_load_does_not_wait_for_the_stores_before_it() -> None:
    host = GatedStore(PAGES, PAGE)
    HostStore.put(host, 30, [page(30)])
    bench = Bench(None, host=host)
    bench.send(store(HOST, range(8), range(8)), store(HOST, range(8), range(8, 16), seq=3))
    assert host.reached.acquire(timeout=10)
    bench.send(load(HOST, range(30, 31), range(20, 21), seq=4))
    host.go_on.release()  # the page that is being stored, and no other
    assert bench.answer() == PagesLoaded(stage=STAGE, seq=4)
    for _ in range(15):
        host.go_on.release()
    assert [bench.answer(), bench.answer()] == [
        PagesStored(stage=STAGE, seq=seq, written_bytes=8 * PAGE) for seq in (1, 3)
    ]
    bench.close()


def test_closing_does_not_wait_for_what_is_queued() -> None:
    host = GatedStore(PAGES, PAGE)
    bench = Bench(None, host=host)
    bench.send(store(HOST, range(8), range(8)))
    assert host.reached.acquire(timeout=10)
    bench.copier.close()
    host.go_on.release()
    bench.close()


@pytest.mark.parametrize(
    "order",
    [
        store(HOST, range(1), range(PAGES, PAGES + 1)),
        store(HOST, range(PAGES, PAGES + 1), range(1)),
        load(HOST, range(1), range(-1, 0)),
        store(HOST, range(2), range(1)),
        store(DISK, range(1), range(1)),
    ],
    ids=["no such slot", "no such page", "no such page to load", "lengths differ", "no such tier"],
)
def test_an_order_that_cannot_be_meant_fails_the_stage(order: CopyOrder) -> None:
    bench = Bench(None)
    bench.ask(store(HOST, range(1), range(1), seq=9))
    failure = bench.ask(order)
    assert isinstance(failure, StageFailed)
    assert failure.message.startswith("copy thread: ")
    bench.close()
