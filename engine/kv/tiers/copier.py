"""The stage's copy thread: executes StorePages, LoadPages and DropPages beside the plans, and reports the results.

    I/O thread ──orders──► loads ──┐
                           others ─┴─► copier ──► pool ◄──► host tier ──► disk tier
    I/O thread ◄──events────────────────┘           ▲───────────────────────┘

Stores and drops are executed in stream order. Loads are executed before them, even between two pages of a store, since
a request waits for them: the scheduler loads no slot before it has been reported as stored, and drops none before the
load is answered, so a load never depends on an order that it overtakes. The library tier has a thread of its own: a
store that is slow or silent delays no other tier. Its files are opened and closed at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from headrace.core.config import StageConfig
from headrace.core.messages.orders import BeginEpoch, CloseKvFile, DropPages, LoadPages, OpenKvFile, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesLost, PagesStored, StageFailed
from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Stats
from headrace.core.types import packed
from headrace.core.types.kv.kv_tiers import DISK, HOST, LIBRARY, PageHeader, Tier
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.disk_store import DiskStore, FoundPage
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.library_store import LibraryStore
from headrace.engine.kv.tiers.pages import FAILURES, Parts, PoolPages, TierError, TierStore, pool_pages
from headrace.engine.kv.tiers.record import Origin
from headrace.engine.kv.tiers.segments import IGNORED, Ignored

log = logging.getLogger(__name__)

Direction = Literal["store", "load"]
DIRECTIONS: tuple[Direction, ...] = ("store", "load")
FOUND_PER_EVENT = 4096  # pages of one PagesFound
CopyEvent = PagesFound | PagesStored | PagesLoaded | PagesLost | StageFailed
CopyOrder = BeginEpoch | StorePages | LoadPages | DropPages | OpenKvFile | CloseKvFile


class TierStatistics:
    """Bytes, seconds and failures of copies, by tier and direction, and pages on disk that are not used. Any thread."""

    def __init__(self, stage: int, tiers: Sequence[Tier]) -> None:
        """stage: pipeline rank, the first label. tiers: those that the stage has; their counters start at 0."""
        self._stage = str(stage)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._throttle = LogThrottle()
        for tier in tiers:
            for direction in DIRECTIONS:
                self._add_copy(direction, tier, 0, 0.0)
                for reason in FAILURES:
                    self._counters.add("stage_tier_failures_total", 0.0, (self._stage, tier, direction, reason))
        if DISK in tiers:
            self.scanned(dict.fromkeys(IGNORED, 0))

    def copied(self, direction: Direction, tier: Tier, size: int, seconds: float) -> None:
        """Count copies of pages."""
        with self._lock:
            self._add_copy(direction, tier, size, seconds)

    def failed(self, direction: Direction, tier: Tier, error: TierError) -> None:
        """Count a page that could not be stored or loaded, and log it now and then."""
        if self._throttle.due(f"{tier} {direction} {error.reason}", time.monotonic()):
            log.warning("%s of a KV page failed: %s", direction, error)
        with self._lock:
            self._counters.add("stage_tier_failures_total", 1.0, (self._stage, tier, direction, error.reason))

    def scanned(self, ignored: Mapping[Ignored, int]) -> None:
        """Count pages and files on disk that are not used, by reason."""
        with self._lock:
            for reason, count in ignored.items():
                self._counters.add("stage_disk_ignored_total", count, (self._stage, reason))

    def snapshot(self) -> Stats:
        """All counters."""
        with self._lock:
            return Stats(self._counters.snapshot())

    def _add_copy(self, direction: Direction, tier: Tier, size: int, seconds: float) -> None:
        labels = (self._stage, tier, direction)
        self._counters.add("stage_tier_bytes_total", size, labels)
        self._counters.add("stage_tier_seconds_total", seconds, labels)


class Copier(threading.Thread):
    """A copy thread of a stage. It owns its tiers and closes them at its end."""

    def __init__(
        self,
        stage: int,
        pool: PoolPages,
        *,
        host: HostStore | None = None,
        disk: DiskStore | None = None,
        library: LibraryStore | None = None,
        report: Callable[[CopyEvent], None],
    ) -> None:
        """stage: pipeline rank. report: called by this thread, with the answers and, should the thread fail, with
        StageFailed."""
        super().__init__(name="stage-copier", daemon=True)
        self._stage = stage
        self._pool = pool
        self._host = host
        self._disk = disk
        self._library = library
        self._stores: dict[Tier, TierStore] = {}
        if host is not None:
            self._stores[HOST] = host
        if disk is not None:
            self._stores[DISK] = disk
        if library is not None:
            self._stores[LIBRARY] = library
        self._report = report
        self._statistics = TierStatistics(stage, tuple(self._stores))
        self._changed = threading.Condition()
        self._loads: deque[LoadPages] = deque()
        self._others: deque[BeginEpoch | StorePages | DropPages] = deque()
        self._closed = False

    @property
    def slots(self) -> Mapping[Tier, int]:
        """Slots of each tier."""
        return {tier: store.slots for tier, store in self._stores.items()}

    def submit(self, order: CopyOrder) -> None:
        """Queue an order. At BeginEpoch the pages found on disk are reported. Any thread."""
        if isinstance(order, OpenKvFile | CloseKvFile):
            if self._library is not None:
                self._library.apply(order)
            return
        with self._changed:
            if isinstance(order, LoadPages):
                self._loads.append(order)
            else:
                self._others.append(order)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the page that it is copying; what is queued is not executed. Any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def statistics(self) -> Stats:
        """Counters of this stage's tiers. Any thread."""
        return self._statistics.snapshot()

    def run(self) -> None:
        """Scan the disk, then execute orders until close(). An unexpected error is reported as StageFailed."""
        try:
            found = self._scan()
            while (order := self._next()) is not None:
                if isinstance(order, BeginEpoch):
                    self._report_found(found)
                    found = []
                else:
                    self._execute(order)
        except Exception as error:
            log.exception("the stage's copy thread has failed")
            self._report(StageFailed(stage=self._stage, message=f"copy thread: {type(error).__name__}: {error}"))
        finally:
            for store in self._stores.values():
                store.close()

    def _next(self) -> BeginEpoch | StorePages | LoadPages | DropPages | None:
        """The next order, loads first; waits for one. None: the copier is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._loads or self._others)
            if self._closed:
                return None
            return self._loads.popleft() if self._loads else self._others.popleft()

    def _execute(self, order: StorePages | LoadPages | DropPages) -> None:
        match order:
            case LoadPages():
                self._load(order)
            case StorePages():
                self._store(order)
            case DropPages(tier=tier):
                for slot in packed.unpack(order.slots):
                    self._stores[tier].drop(slot)

    def _load(self, order: LoadPages) -> None:
        store, started = self._stores[order.tier], time.perf_counter()
        failed, total = [], 0
        slots = packed.unpack(order.slots)
        store.expect(slots)
        pairs = zip(slots, packed.unpack(order.pages), strict=True)
        for index, (slot, page) in enumerate(pairs):
            if self._closed:
                return
            try:
                self._pool.write(page, store.get(slot))
            except TierError as error:
                failed.append(index)
                self._statistics.failed("load", order.tier, error)
            else:
                total += self._pool.page_bytes
        self._pool.flush()
        self._statistics.copied("load", order.tier, total, time.perf_counter() - started)
        self._report(PagesLoaded(stage=self._stage, seq=order.seq, failed=packed.pack(failed)))

    def _store(self, order: StorePages) -> None:
        store = self._stores[order.tier]
        failed, total = [], 0
        headers: tuple[PageHeader | None, ...] = order.headers
        slots, sources = packed.unpack(order.slots), packed.unpack(order.sources)
        pages = map(self._on_host, sources) if order.from_host else self._pool.read(sources)
        targets = zip(sources, slots, headers or (None,) * len(slots), strict=True)
        for index, (_, slot, header) in enumerate(targets):
            while self._loads:  # this thread is their only consumer
                self._load(self._loads.popleft())
            if self._closed:
                return
            started = time.perf_counter()
            try:
                written = store.put(slot, next(pages), header)
            except TierError as error:
                failed.append(index)
                self._statistics.failed("store", order.tier, error)
            else:
                total += written
                self._statistics.copied("store", order.tier, written, time.perf_counter() - started)
        stage = self._stage
        self._report(PagesStored(stage=stage, seq=order.seq, failed=packed.pack(failed), written_bytes=total))
        if lost := store.take_lost():
            self._report(PagesLost(stage=stage, tier=order.tier, slots=packed.pack(lost)))

    def _on_host(self, slot: int) -> Parts:
        """A page of the host tier. Raises TierError for a slot that does not hold what was stored."""
        assert self._host is not None, "pages come from the host tier only where there is one"
        return (self._host.get(slot),)

    def _scan(self) -> list[FoundPage]:
        """Pages on disk. A directory that cannot be read is an empty one."""
        if self._disk is None:
            return []
        try:
            found = self._disk.scan()
        except OSError as error:
            log.warning("the disk tier's directory cannot be read: %s", error)
            return []
        self._statistics.scanned(self._disk.ignored)
        log.info("disk tier: %d pages found, ignored: %s", len(found), dict(self._disk.ignored) or "none")
        return found

    def _report_found(self, found: list[FoundPage]) -> None:
        """Report what was found, in parts; where there is a disk tier, at least one."""
        if self._disk is None:
            return
        for at in range(0, max(1, len(found)), FOUND_PER_EVENT):
            part = found[at : at + FOUND_PER_EVENT]
            self._report(
                PagesFound(
                    stage=self._stage,
                    slots=packed.pack(page.slot for page in part),
                    headers=tuple(page.header for page in part),
                    last=at + FOUND_PER_EVENT >= len(found),
                )
            )


def open_tiers(
    config: StageConfig, pool: KVPool, fingerprint: str, report: Callable[[CopyEvent], None]
) -> Copier | None:
    """The copy thread of a stage with its host and disk tiers, not yet started; None without them.

    report: see Copier. Raises ConfigError when the memory or the directory cannot be had.
    """
    engine, geometry = config.engine, pool.geometry
    if not engine.host_pages and not engine.disk_path:
        return None
    disk = None
    if engine.disk_path:
        budget = int((engine.disk_gib << 30) * _share(config))
        stage = config.layout.place(config.rank).stage
        shard = config.rank - config.layout.rank(stage)
        disk = DiskStore(engine.disk_path, Origin(fingerprint, geometry, stage, shard, config.layout.tp), budget)
    host = None
    if engine.host_pages:
        host = HostStore(engine.host_pages, geometry.page_bytes)
    return Copier(config.rank, pool_pages(pool), host=host, disk=disk, report=report)


def open_library(
    config: StageConfig, pool: KVPool, fingerprint: str, report: Callable[[CopyEvent], None]
) -> Copier | None:
    """The copy thread of a stage with its library tier, not yet started; None without one.

    report: see Copier. Raises ConfigError when the system refuses memory.
    """
    if not config.engine.kv_library:
        return None
    store = LibraryStore(fingerprint, pool.geometry)
    return Copier(config.rank, pool_pages(pool), library=store, report=report)


def _share(config: StageConfig) -> float:
    """This rank's share of the disk: that of the layers, so that all stages have about as many slots, divided by the
    ranks of the stage."""
    layers, layout = config.engine.pp_layers, config.layout
    share = layers[layout.place(config.rank).stage] / sum(layers) if layers else 1 / layout.pp
    return share / (layout.dp * layout.tp)
