"""Checks that pages and slots are left alone while they are copied, and that slots hold what is loaded from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.messages.orders import DropPages, Forward, LoadPages, Order, PrepareReceive, SendChunk, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesStored
from headrace.core.types.kv.kv_tiers import Tier
from headrace.core.types.packed import unpack
from headrace.scheduler.state.events import Event


@dataclass(slots=True)
class GuardedCopy:
    """One order that copies pages."""

    loads: bool
    tier: Tier
    pages: set[int]
    slots: set[int]
    stages: set[int] = field(default_factory=set)
    """Stages that have not answered."""


class CopyGuard:
    """Follows one replica's copies by its orders and events."""

    def __init__(self, stages: Sequence[int], page_size: int) -> None:
        self._stages = stages
        self._page_size = page_size
        self._copies: dict[int, GuardedCopy] = {}
        self._taken: dict[Tier, set[int]] = {"host": set(), "disk": set()}
        self._readable: dict[Tier, set[int]] = {"host": set(), "disk": set()}

    def order(self, order: Order) -> str | None:
        """Take in an order; returns what it violates, None if nothing."""
        match order:
            case Forward():
                return next(
                    (problem for row in order.rows if (problem := self._row(unpack(row.pages), row.start))), None
                )
            case PrepareReceive():
                return self._touch("written by a peer", set(unpack(order.pages)), writes=True)
            case SendChunk():
                return self._touch("sent", set(unpack(order.pages)), writes=False)
            case StorePages():
                return self._store(order)
            case LoadPages():
                return self._load(order)
            case DropPages():
                return self._drop(order)
            case _:
                return None

    def event(self, event: Event) -> None:
        """Take in an event: a stage has copied pages, or has found some."""
        if isinstance(event, PagesStored | PagesLoaded) and event.seq in self._copies:
            copy = self._copies[event.seq]
            copy.stages.discard(event.stage)
            if not copy.stages:
                del self._copies[event.seq]
                self._readable[copy.tier] |= copy.slots
        elif isinstance(event, PagesFound):
            for slots in (self._taken["disk"], self._readable["disk"]):
                slots.update(unpack(event.slots))

    def reset(self) -> None:
        """The engine is gone. What its disk holds will be found."""
        self._copies.clear()
        for slots in (*self._taken.values(), *self._readable.values()):
            slots.clear()

    def _row(self, pages: Sequence[int], start: int) -> str | None:
        written = set(pages[start // self._page_size :])
        return self._touch("read", set(pages), writes=False) or self._touch("computed", written, writes=True)

    def _touch(self, what: str, pages: set[int], writes: bool) -> str | None:
        for seq, copy in self._copies.items():
            if (copy.loads or writes) and copy.pages & pages:
                return f"pages {copy.pages & pages} are {what} while order {seq} copies them"
        return None

    def _store(self, order: StorePages) -> str | None:
        pages, slots = set(unpack(order.sources)), set(unpack(order.slots))
        if len(slots) != len(order.slots) // 4 or self._taken[order.tier] & slots:
            return f"order {order.seq} stores to slots of the {order.tier} tier that are taken"
        self._taken[order.tier] |= slots
        problem = next((f"order {order.seq} stores pages that are being loaded" for copy in self._copies.values()
                        if copy.loads and copy.pages & pages), None)  # fmt: skip
        self._copies[order.seq] = GuardedCopy(False, order.tier, pages, slots, set(self._stages))
        return problem

    def _load(self, order: LoadPages) -> str | None:
        pages, slots = set(unpack(order.pages)), set(unpack(order.slots))
        problem = self._touch("loaded", pages, writes=True)
        if not slots <= self._readable[order.tier]:
            problem = f"order {order.seq} loads slots of the {order.tier} tier that hold nothing"
        self._copies[order.seq] = GuardedCopy(True, order.tier, pages, slots, set(self._stages))
        return problem

    def _drop(self, order: DropPages) -> str | None:
        slots = set(unpack(order.slots))
        self._taken[order.tier] -= slots
        self._readable[order.tier] -= slots
        busy = {slot for copy in self._copies.values() if copy.tier == order.tier for slot in copy.slots & slots}
        return f"slots {busy} of the {order.tier} tier are dropped while they are copied" if busy else None
