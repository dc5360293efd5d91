"""Checks of what a simulated server does, as it happens: pages that bytes may still be read from or written to are not
reused, pages and slots are left alone while they are copied, and what was promised to clients and peers is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import (
    CloseKvFile,
    DropPages,
    Forward,
    LoadPages,
    OpenKvFile,
    Order,
    PrepareReceive,
    ReleaseRequest,
    ReplicaOrder,
    SendChunk,
    StorePages,
)
from headrace.core.messages.peers import PeerRenewed, TellCancelled, TellFailed, TellFinished
from headrace.core.messages.replies import Held, RequestFailed, SchedulerReply
from headrace.core.messages.stage_events import (
    ChunkAcked,
    KvReceived,
    PagesFound,
    PagesLoaded,
    PagesStored,
    ReceiveCancelled,
    SendCancelled,
)
from headrace.core.types.errors import LEASE_EXPIRED, NO_PEER
from headrace.core.types.kv.kv_tiers import TIERS, Tier
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import SendTo
from headrace.scheduler.state.events import Effect, Event

ROUNDING_S = 1e-9


class PageGuard:
    """Checks the orders to one replica, and its events: pages that bytes may still be read from or written to are not
    reused."""

    def __init__(self, stages: Sequence[int], page_size: int) -> None:
        self._stages = stages
        self._page_size = page_size
        self._held: dict[int, set[int]] = {}  # pages by request, as long as bytes are under way for it
        self._open: dict[int, set[tuple[int, int]]] = {}  # by request: stages and their chunks (-1: what they receive)
        self._requests: dict[tuple[str, str, int], int] = {}  # by session, ticket and generation
        self._owners: dict[int, int] = {}  # request that a page was last given to

    def order(self, order: Order) -> str | None:
        """Take in an order; returns what it violates, None if nothing."""
        if isinstance(order, Forward):
            for row in order.rows:
                written = set(unpack(row.pages)[row.start // self._page_size :])
                self._owners.update(dict.fromkeys(written, row.request))
                if problem := self._clash(row.request, written):
                    return problem
        elif isinstance(order, PrepareReceive):
            pages = set(unpack(order.pages))
            if problem := self._clash(order.request, pages):
                return problem
            self._requests[order.session, order.ticket, order.generation] = order.request
            self._owners.update(dict.fromkeys(pages, order.request))
            self._hold(order.request, pages, {(stage, -1) for stage in self._stages})
        elif isinstance(order, SendChunk):
            self._hold(order.request, set(unpack(order.pages)), {(stage, order.chunk) for stage in self._stages})
        elif isinstance(order, ReleaseRequest):  # its pages are free: nothing may be written into them for it
            if order.request in self._held:
                return f"request {order.request} is released while its bytes may be under way"
            self._owners = {page: owner for page, owner in self._owners.items() if owner != order.request}
        return None

    def written(self, send: SendChunk) -> str | None:
        """A prefill server has written into our pages directly; returns what that violates, None if nothing."""
        request = self._requests.get((send.session, send.ticket, send.generation))
        others = {owner for page in unpack(send.dst_pages) if (owner := self._owners.get(page)) != request}
        return f"{send.ticket} was written into pages of requests {others}" if others else None

    def event(self, event: Event) -> None:
        """Take in an event: bytes were acknowledged, have arrived, or are not sent or written any more."""
        if isinstance(event, ChunkAcked):
            self._free(event.request, {(event.stage, event.chunk)})
        elif isinstance(event, KvReceived):
            self._free(event.request, {(event.stage, -1)})
        elif isinstance(event, SendCancelled | ReceiveCancelled):
            mine = {entry for entry in self._open.get(event.request, set()) if entry[0] == event.stage}
            self._free(event.request, mine)

    def reset(self) -> None:
        """The engine is gone, and with it all bytes that were under way."""
        self._held.clear()
        self._open.clear()

    def _clash(self, request: int, pages: set[int]) -> str | None:
        for other, held in self._held.items():
            if other != request and held & pages:
                return f"request {request} is given pages {held & pages} that bytes of {other} may still touch"
        return None

    def _hold(self, request: int, pages: set[int], entries: set[tuple[int, int]]) -> None:
        self._held.setdefault(request, set()).update(pages)
        self._open.setdefault(request, set()).update(entries)

    def _free(self, request: int, entries: set[tuple[int, int]]) -> None:
        if request in self._open:
            self._open[request] -= entries
            if not self._open[request]:
                del self._open[request], self._held[request]


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
    """Follows one replica's copies by its orders and events: slots hold what is loaded from them."""

    def __init__(self, stages: Sequence[int], page_size: int) -> None:
        self._stages = stages
        self._page_size = page_size
        self._copies: dict[int, GuardedCopy] = {}
        self._taken: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        self._readable: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        self._files: dict[int, set[int]] = {}  # slots of KV files, by the first

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
            case OpenKvFile():
                return self._open(order)
            case CloseKvFile():
                self._readable["library"] -= self._files.pop(order.first)
                return None
            case _:
                return None

    def event(self, event: Event) -> None:
        """Take in an event: a stage has copied pages, or has found some."""
        if isinstance(event, PagesStored | PagesLoaded) and event.seq in self._copies:
            copy = self._copies[event.seq]
            copy.stages.discard(event.stage)
            if not copy.stages:
                del self._copies[event.seq]
                if copy.tier != "library":  # its files may be closed meanwhile
                    self._readable[copy.tier] |= copy.slots
        elif isinstance(event, PagesFound):
            for slots in (self._taken["disk"], self._readable["disk"]):
                slots.update(unpack(event.slots))

    def reset(self) -> None:
        """The engine is gone. What its disk holds will be found."""
        self._copies.clear()
        self._files.clear()
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

    def _open(self, order: OpenKvFile) -> str | None:
        slots = set(range(order.first, order.first + order.pages))
        busy = {slot for copy in self._copies.values() if copy.tier == "library" for slot in copy.slots & slots}
        if clash := busy | self._readable["library"] & slots:
            return f"order {order.seq} opens a KV file in slots {clash} that another one has"
        self._files[order.first] = slots
        self._readable["library"] |= slots
        return None

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


class PromiseGuard:
    """Follows what one server has promised by its events and effects.

    cancel    a request that has come, and has not ended, has ended when its Abort has been handled; one that tells
              an error of the prefill server does not matter any more once all KV has come
    room      a prompt waits for its peer until the bootstrap timeout has passed since the peer last named its ticket
    lease     a held request does not expire before the end of its lease, which every heartbeat renews
    release   a number that the stages were told to forget is not used again
    reply     a use of a ticket is told one end; no chunk is ordered for it after that
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lease_s = config.hold_lease_s
        self._limit_s = config.hold_limit_s
        self._rooms: dict[str, tuple[str, float, float]] = {}  # by ticket: rid, end of the wait, and its limit
        self._live: set[str] = set()
        self._pieces: set[str] = set()  # of open prompts: one that is finished ends with the pass that it is in
        self._tickets: dict[str, str] = {}  # of held requests, by rid
        self._leases: dict[str, tuple[float, float]] = {}  # by ticket: its end, and beyond what it is not renewed
        self._released: set[int] = set()
        self._replies: dict[tuple[str, str, int], str] = {}

    def handled(self, event: Event, now: float) -> str | None:
        """An event was handled, and its effects are known; returns what that violates, None if nothing."""
        late = isinstance(event, Abort) and event.finish and event.rid in self._pieces
        if (
            isinstance(event, Abort)
            and event.rid in self._live
            and not ((event.error and event.error.at_prefill) or late)
        ):
            return f"{event.rid} goes on after it was cancelled"
        if isinstance(event, PeerRenewed):
            for ticket in event.tickets:
                if ticket in self._rooms:
                    rid, _, limit = self._rooms[ticket]
                    self._rooms[ticket] = (rid, min(now + self._config.bootstrap_timeout_s, limit), limit)
                if ticket in self._leases:
                    _, limit = self._leases[ticket]
                    self._leases[ticket] = (min(now + self._lease_s, limit), limit)
        return None

    def submitted(self, event: Submit, now: float) -> None:
        """A request comes now."""
        self._live.add(event.rid)
        if event.open:
            self._pieces.add(event.rid)
        if not isinstance(event.route, SendTo):
            return
        if event.route.hold:
            self._tickets[event.rid] = event.route.ticket
        elif event.route.ticket not in self._rooms:
            timeout_s, longest_s = self._config.bootstrap_timeout_s, self._config.longest_wait_s
            self._rooms[event.route.ticket] = (event.rid, now + timeout_s, now + longest_s)

    def output(self, output: SchedulerReply, now: float) -> str | None:
        """Take in a reply to the front end; returns what it violates, None if nothing."""
        if isinstance(output, Held):
            if output.lease_s > 0:
                self._leases[self._tickets[output.rid]] = (now + output.lease_s, now + self._limit_s)
            return None
        if isinstance(output, RequestFailed) and output.error.code == NO_PEER:
            end = max((end for rid, end, _ in self._rooms.values() if rid == output.rid), default=now)
            return f"{output.rid} has no peer at {now}; it waits until {end}" if now < end - ROUNDING_S else None
        if not isinstance(output, RequestFailed) or output.error.code != LEASE_EXPIRED:
            return None
        end, _ = self._leases.get(self._tickets.get(output.rid, ""), (now, now))
        return f"{output.rid} has expired at {now}; its lease ends at {end}" if now < end - ROUNDING_S else None

    def ended(self, rid: str) -> None:
        """A request has ended."""
        self._live.discard(rid)
        self._rooms = {ticket: room for ticket, room in self._rooms.items() if room[0] != rid}

    def effect(self, effect: Effect) -> str | None:
        """Take in an order or a reply to a peer; returns what it violates, None if nothing."""
        if isinstance(effect, ReplicaOrder):
            return self._order(effect.order)
        if isinstance(effect, Order):
            return self._order(effect)
        if not isinstance(effect, TellFinished | TellFailed | TellCancelled):
            return None
        key, kind = (effect.session, effect.ticket, effect.generation), type(effect).__name__
        before = self._replies.setdefault(key, kind)
        # A cancel is answered, whatever else has ended the use before.
        if before != kind and not isinstance(effect, TellCancelled):
            return f"{effect.ticket} is told {kind} after {before}"
        return None

    def _order(self, order: Order) -> str | None:
        if isinstance(order, Forward):
            if self._released and (known := self._released.intersection(row.request for row in order.rows)):
                return f"requests {known} are computed after their release"
        elif isinstance(order, SendChunk):
            if reply := self._replies.get((order.session, order.ticket, order.generation)):
                return f"a chunk of {order.ticket} is sent after {reply}"
        elif isinstance(order, ReleaseRequest):
            self._released.add(order.request)
        elif isinstance(order, PrepareReceive) and order.request in self._released:
            return f"request {order.request} is prepared after its release"
        return None
