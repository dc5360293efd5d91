"""Copies of KV pages between the pool and its tiers: orders to the stages, and what their answers mean for requests.

pages leave the pool, or are written to disk ─► StorePages ─► every stage: PagesStored ─► the copy can be loaded
a prompt continues in a tier ─► LoadPages ─► every stage: PagesLoaded ─► it is planned behind them
                                                   └─ failed: it waits again, and computes what was not loaded
a prefix that is handed over does, likewise: it is sent then, and fails with a page of it
slots are given up ─► DropPages
"""

from collections.abc import Sequence

from headrace.core.messages.orders import DropPages, LoadPages, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesLost, PagesStored
from headrace.core.types.kv.kv_tiers import LIBRARY, TIERS, PageHeader, Tier
from headrace.core.types.packed import pack, unpack
from headrace.scheduler.kv.copy_table import PendingCopy
from headrace.scheduler.kv.node import Node, PageLoad, StoringPages, root_of
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.prefix_handover import PrefixHandover
from headrace.scheduler.queues.deadlines import CopyTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

ORDER_PAGES = 256  # pages of one order at most, so that a long copy is answered in parts


class PageCopies:
    """Orders the copies that a replica's prefix cache has begun, and ends them when each of its ranks has answered."""

    def __init__(self, state: State, replica: Replica, completion: Completion, handover: PrefixHandover) -> None:
        self._state = state
        self._replica = replica
        self._completion = completion
        self._handover = handover

    def order(self, now: float) -> None:
        """Order what the cache has decided on. Slots are dropped before they are used again."""
        state, tiers = self._state, self._replica.cache.tiers
        if tiers is None or not state.engine.ready:
            return
        tiers.may_write = self._replica.copies.may_write(now)
        begun = self._replica.cache.copies_begun()
        for tier in TIERS:
            if slots := tiers.slots(tier).dropped():
                if tier != LIBRARY:  # whose files stay as they are
                    self._replica.order(DropPages(seq=state.out.next_seq(), tier=tier, slots=pack(slots)))
                self._count("dropped", tier, len(slots))
        for copy in begun:
            if not len(self._replica.copies):
                state.deadlines.set(CopyTimer(self._replica.index), now + state.config.stage_timeout_s)
            pending = PendingCopy(copy, now)
            if isinstance(copy, StoringPages):
                self._order_store(pending, copy)
            else:
                self._order_load(pending, copy)

    def take(self, event: PagesStored | PagesLoaded | PagesLost | PagesFound, now: float) -> None:
        """A rank of the replica has stored, loaded or lost pages, or has found them on its disk."""
        match event:
            case PagesStored():
                self._stored(event, now)
            case PagesLoaded():
                self._loaded(event, now)
            case PagesLost():
                if self._replica.cache.tiers is not None:
                    self._replica.cache.tiers.lost(event.tier, unpack(event.slots))
            case PagesFound():
                self._replica.copies.found(event.stage, unpack(event.slots), event.headers, event.last)
                self.restore()

    def _stored(self, event: PagesStored, now: float) -> None:
        """A stage has stored pages."""
        pending = self._answered(event, now)
        if pending is None:
            return
        assert isinstance(pending.copy, StoringPages), "PagesStored answers StorePages"
        if pending.copy.tier == "disk":
            self._replica.copies.written(event.stage, event.written_bytes)
        if not pending.waiting:
            self._count_end("store", pending.copy.tier, len(pending.copy.nodes), len(pending.failed))
            self._replica.cache.copied(pending.copy, pending.failed)
            self._handover.resume(self._replica, now)

    def _loaded(self, event: PagesLoaded, now: float) -> None:
        """A stage has loaded pages. Once every stage has, requests that wait for them go on."""
        state = self._state
        pending = self._answered(event, now)
        if pending is None or pending.waiting:
            return
        copy = pending.copy
        assert isinstance(copy, PageLoad), "PagesLoaded answers LoadPages"
        first = min(pending.failed, default=len(copy.nodes))
        for tier in TIERS:
            failed = sum(copy.tiers[index] == tier for index in pending.failed)
            self._count_end("load", tier, copy.tiers.count(tier), failed)
            if count := copy.tiers.count(tier):
                hits = (count - failed) * state.config.page_size
                state.metrics.counters.add("kv_tier_hit_tokens_total", hits, (tier,))
                self._replica.copies.measured(tier, count, (now - pending.began) * count / len(copy.nodes))
        loading = (*self._replica.queues.prefilling.values(), *self._replica.moves.values())
        waiting = [one for one in loading if one.lease is not None and one.lease.load is copy]
        bad = copy.nodes[first] if pending.failed else None
        good = []
        for request in waiting:
            assert request.lease is not None, "just seen"
            good_pages = next((index for index, node in enumerate(request.lease.path) if node is bad), None)
            if good_pages is None:
                good.append(request)
            elif request.from_cache:
                self._handover.not_loaded(request, good_pages, now)
            else:
                self._begin_again(request, now)
        self._replica.cache.copied(copy, pending.failed)
        for request in good:
            assert request.lease is not None, "just seen"
            self._replica.cache.loaded(request.lease, request.tokens)
            if request.from_cache:
                self._handover.loaded(request, now)
        self._handover.resume(self._replica, now)

    def restore(self) -> None:
        """Once every stage is up and has said what is on its disk: use what all of them have."""
        state, tiers = self._state, self._replica.cache.tiers
        if not state.engine.ready or tiers is None or tiers.disk_ready:
            return
        slots = tiers.slots("disk")
        found = self._replica.copies.take_found(slots.total)
        if found is None:
            return
        alike, others = found
        restored = tiers.restore(alike)
        slots.drop([*others, *(slot for slot, _ in alike if slots.node(slot) is None)])
        tiers.disk_ready = True
        self._count("restored", "disk", restored)

    def _order_store(self, pending: PendingCopy, store: StoringPages) -> None:
        out = self._state.out
        for first in range(0, len(store.nodes), ORDER_PAGES):
            nodes = store.nodes[first : first + ORDER_PAGES]
            order = StorePages(
                seq=out.next_seq(),
                tier=store.tier,
                sources=pack(node.page for node in nodes),
                slots=pack(store.slots[first : first + ORDER_PAGES]),
                headers=_headers(nodes) if store.tier == "disk" else (),
            )
            self._replica.order(order)
            self._replica.copies.add(pending, order.seq, first)

    def _order_load(self, pending: PendingCopy, load: PageLoad) -> None:
        """One order for each run of pages from the same tier."""
        out, first = self._state.out, 0
        while first < len(load.nodes):
            tier, end = load.tiers[first], first
            while end < len(load.nodes) and load.tiers[end] == tier and end - first < ORDER_PAGES:
                end += 1
            nodes = load.nodes[first:end]
            order = LoadPages(
                seq=out.next_seq(),
                tier=tier,
                slots=pack(node.copies.slots[tier] for node in nodes if node.copies is not None),
                pages=pack(node.page for node in nodes),
            )
            self._replica.order(order)
            self._replica.copies.add(pending, order.seq, first)
            first = end

    def _answered(self, event: PagesStored | PagesLoaded, now: float) -> PendingCopy | None:
        state = self._state
        pending = self._replica.copies.answered(event.seq, event.stage, event.failed)
        if pending is None:
            state.drop("unknown_copy")
        elif len(self._replica.copies):
            state.deadlines.set(CopyTimer(self._replica.index), now + state.config.stage_timeout_s)
        else:
            state.deadlines.clear(CopyTimer(self._replica.index))
        return pending

    def _begin_again(self, request: Request, now: float) -> None:
        """A request's cached pages could not be loaded: give back what it has, and let it wait again."""
        state = self._state
        self._completion.free_pages(request)
        self._replica.queues.restart(request)
        state.enter(request, Phase.WAITING, now)

    def _count_end(self, operation: str, tier: Tier, pages: int, failed: int) -> None:
        self._count(f"{operation}_failed", tier, failed)
        self._count("stored" if operation == "store" else "loaded", tier, pages - failed)

    def _count(self, result: str, tier: Tier, pages: int) -> None:
        if pages:
            self._state.metrics.counters.add("kv_tier_pages_total", pages, (tier, result))


def _headers(nodes: Sequence[Node]) -> tuple[PageHeader, ...]:
    """What names the pages of one path on disk."""
    root = root_of(nodes[0])
    parents = (root if node.parent is None else node.parent for node in nodes)
    return tuple(
        PageHeader(node.key, above.key, root.key, node.turn) for node, above in zip(nodes, parents, strict=True)
    )
