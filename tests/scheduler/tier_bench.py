"""Drives one Scheduler whose stages have tiers."""

from headrace.core.messages.orders import Forward, LoadPages, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesStored
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.core.types.packed import pack
from headrace.scheduler.scheduler import Effect
from tests.scheduler.bench import Bench

FIRST, SECOND = list(range(100, 112)), list(range(200, 228))


class TierBench(Bench):
    """A pool of eight pages, and stages with tiers."""

    def __init__(self, host: int = 32, disk: int = 0, **changes: object) -> None:
        self.tier_pages = (host, disk)
        self.answered = 0  # StorePages
        super().__init__(kv_pages=8, chunk_tokens=64, disk_admission_turn=0, **changes)

    def up(self) -> None:
        host, disk = self.tier_pages
        for stage in range(self.config.stages):
            self.do(self.ready(stage, host_pages=host, disk_pages=disk))

    def run(self, rid: str, tokens: list[int]) -> None:
        """Compute a prompt to its end."""
        self.submit(rid, tokens, max_tokens=1)
        self.compute(1)

    def stored(self, order: StorePages, failed: tuple[int, ...] = (), stage: int = 0, size: int = 0) -> list[Effect]:
        return self.do(PagesStored(stage=stage, seq=order.seq, failed=pack(failed), written_bytes=size))

    def loaded(self, order: LoadPages, failed: tuple[int, ...] = (), stage: int = 0) -> list[Effect]:
        return self.do(PagesLoaded(stage=stage, seq=order.seq, failed=pack(failed)))

    def found(self, headers: dict[int, PageHeader], stage: int = 0, last: bool = True) -> list[Effect]:
        return self.do(PagesFound(stage=stage, slots=pack(headers), headers=tuple(headers.values()), last=last))

    def displace(self) -> None:
        """Compute FIRST, and then SECOND, which needs its pages."""
        self.run("first", FIRST)
        self.submit("second", SECOND, max_tokens=1)
        assert self.plan() is None, "SECOND waits for FIRST's pages to be copied"
        self.store_all()
        self.compute(1)

    def load_first(self, **fields: object) -> LoadPages:
        """A request with FIRST's tokens and more, whose cached pages are being loaded."""
        self.submit("again", [*FIRST, 1, 2], **{"max_tokens": 1, **fields})
        while not self.all(LoadPages):
            assert self.plan() is None
            if not self.all(LoadPages):
                self.store_all()
        return self.one(LoadPages)

    def loading(self) -> LoadPages:
        """The load that has begun without a plan, once there are pages for it."""
        while not self.all(LoadPages):
            self.store_all()
        return self.one(LoadPages)

    def store_all(self) -> None:
        """Answer all stores that have no answer yet, of which there has to be one."""
        orders = self.all(StorePages)[self.answered :]
        assert orders, "nothing is being stored"
        self.answered += len(orders)
        for order in orders:
            for stage in range(self.config.stages):
                self.stored(order, stage=stage)

    def planned(self) -> Forward:
        """The next pass, once pages that it needs were stored."""
        while (forward := self.plan()) is None:
            self.store_all()
        return forward
