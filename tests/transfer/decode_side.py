"""A decode server as simple as the protocol's promises allow: ControlClient and Receiver, with deadlines and a pool.

Pages that are given back are poisoned at once, so a byte that is written too late is found.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskCancel,
    AskReserve,
    ConnectPrefill,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
)
from headrace.core.messages.stage_events import KvReceived, ReceiveCancelled, ReceiveFailed, SessionClosed
from headrace.core.types.kv.backends import NIXL, writes_directly
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.layout import pages_for
from headrace.transfer.protocol.matching import make_hello
from tests.transfer.memory_devices import DevicePool
from tests.transfer.memory_zmq import Context
from tests.transfer.world import (
    PAGES,
    PATIENCE_S,
    POISON,
    STATE,
    Side,
    World,
    all_slots,
    content,
    draft_of,
    paged,
    poison,
    slots_of,
    state_of,
)

FINGERPRINT = "model"  # of the prefill side
POISONED = bytes([POISON]) * (1 << 16)  # more than any pool here


@dataclass(eq=False)
class Incoming:
    """One use of a ticket at the decode side."""

    serial: int
    ticket: str
    generation: int
    session: str
    pages: list[int]
    tokens: int
    cached: int
    deadline: float = 0.0
    end: str = ""
    cancelling: bool = False
    row: int = -1
    draft: DraftTerms = NO_DRAFT
    slot: int = -1
    """Of its states, where there are any."""


class DecodeSide(Side):
    """A control client, a stage's receiver, and a pool whose returned pages stay poisoned or are another request's."""

    def __init__(self, world: "World", geometry: Geometry, endpoint: str, fingerprint: str = FINGERPRINT) -> None:
        """fingerprint: of its model; with another one than the prefill side has, no session may begin."""
        super().__init__(world)
        self.geometry = geometry
        self.fingerprint = fingerprint
        on_device = world.devices and not writes_directly(world.backend)
        self.store = DevicePool(world.network, geometry, PAGES) if on_device else ArrayPageStore(geometry, PAGES)
        self.free, self.free_slots = list(range(PAGES)), all_slots(self.store)
        poison(self.store, slice(None), self.free_slots)
        self.direct = writes_directly(world.backend)
        self.session = ""
        self.open: dict[int, Incoming] = {}
        self.ended: list[Incoming] = []
        self.given_up: dict[int, Incoming] = {}  # that this side's own copies may still write for
        context: Any = Context(world.network)
        self.control_client = ControlClient(world.config, context)
        agents = world.backend == NIXL
        self.shared = world.agents.share(self.store) if agents else world.pools.share(geometry, self.store)
        pools = {world.backend: self.shared}
        self.receiver = Receiver(
            world.config, stage=0, geometry=geometry, store=self.store, context=context, registered_pools=pools
        )
        self.ports = [self.control_client, self.receiver]
        self.control_client.ready(
            make_hello(
                world.config, instance=world.new_id(), name="decode", role="decode", fingerprint=fingerprint,
                geometries=(geometry,), kv_pages=PAGES, max_model_len=1024, metadata_rows=64,
                backends=(world.backend,), memory=(self.shared.memory,),
            )
        )  # fmt: skip
        self.apply(self.control_client, ConnectPrefill(name="p", endpoint=endpoint))

    def fetch(self, ticket: str) -> None:
        random = self.world.network.random
        tokens = random.randrange(1, 60)
        cached = random.choice((0, random.randrange(tokens)))
        needed = pages_for(self.geometry.page_size, cached, tokens - cached)
        busy = {one.ticket for one in self.open.values()}
        no_slot = self.geometry.state_bytes and not self.free_slots
        if not self.session or needed > len(self.free) or ticket in busy or no_slot:
            return
        self.world.uses += 1
        pages, self.free = self.free[:needed], self.free[needed:]
        use = self.world.uses
        one = Incoming(use, ticket, use, self.session, pages, tokens, cached, self.world.network.now + PATIENCE_S)
        one.slot = self.free_slots.pop(0) if self.geometry.state_bytes else -1
        self.open[one.serial] = one
        row = min(set(range(64)) - {each.row for each in self.open.values()})
        one.row = row
        names: dict[str, Any] = {
            "ticket": ticket,
            "generation": use,
            "row": row,
            "pages": pack(pages),
            "slot": one.slot,
        }
        names["draft"] = one.draft = DraftTerms(use % 3 == 0, 2 * (use % 4 == 0))
        count = tokens - cached
        order = PrepareReceive(seq=0, request=use, session=one.session, start=cached, count=count, **names)
        self.apply(self.receiver, order)
        if not one.end:
            reservation = Reservation(prompt_tokens=tokens, cached_tokens=cached, **names)
            self.apply(self.control_client, AskReserve(session=one.session, reservation=reservation))

    def handle(self, event: Any) -> None:
        match event:
            case PrefillUp():
                self.connect(event)
            case PrefillDown(session=session) if session is not None:
                self.session = "" if session == self.session else self.session
                for one in self.of_session(session):
                    self.give_up(one, "down")
                self.apply(self.receiver, CloseSession(seq=0, session=session))
            case ReceiveCancelled(request=request) if request in self.given_up:
                self.give_back(self.given_up.pop(request))
            case SessionClosed(session=session):
                assert not any(one.session == session for one in self.given_up.values()), "still writes (G2)"
                for one in self.of_session(session):
                    self.finish(one)
            case KvReceived(request=request, first=first) if request in self.open:
                one = self.open[request]
                expected = draft_of(one.ticket, one.generation, one.tokens, one.draft)
                assert first.draft == expected, "draft data of another use, or none (G4)"
                self.arrived(one)
            case ReceiveFailed(request=request, code=code) if request in self.open:
                assert code not in ("bad_chunk", "bad_metadata", "bad_reservation"), event
                assert code != "checksum_mismatch" or self.world.network.damaged, event
                self.cancel(self.open[request], "failed")
            case TicketFailed(ticket=ticket, generation=generation):
                for one in [o for o in self.open.values() if (o.ticket, o.generation) == (ticket, generation)]:
                    self.give_up(one, "failed")
                    self.finish(one)
            case TicketCancelled(ticket=ticket, generation=generation):
                for one in [o for o in self.open.values() if (o.ticket, o.generation) == (ticket, generation)]:
                    self.finish(one)

    def connect(self, up: PrefillUp) -> None:
        assert self.fingerprint == FINGERPRINT, "a session with another model has begun (G6)"
        self.session = up.session
        self.apply(self.receiver, OpenSession(seq=0, terms=up.terms))

    def of_session(self, session: str) -> list[Incoming]:
        return [one for one in self.open.values() if one.session == session]

    def arrived(self, one: Incoming) -> None:
        """The bytes have to be those of this use (G4); the pages go back."""
        size = self.geometry.page_size
        for position in range(one.cached, one.tokens):
            page = one.pages[position // size - one.cached // size]
            for data, place in slots_of(self.store, page, position % size, position):
                wanted = content(one.ticket, one.generation, place, data.size)
                assert np.array_equal(data.reshape(-1), wanted), f"foreign bytes at {place} of {one} (G3, G4)"
        for data, place in state_of(self.store, one.slot, one.tokens):
            wanted = content(one.ticket, one.generation, place, data.size)
            assert np.array_equal(data.reshape(-1), wanted), f"a foreign state came for {one} (G3, G4)"
        one.end = "arrived"
        self.give_back(one)
        self.finish(one)

    def cancel(self, one: Incoming, why: str) -> None:
        """Ask to cancel, and again when nothing answers: a network that loses messages may have lost it."""
        self.give_up(one, why)
        one.cancelling, one.deadline = True, self.world.network.now + PATIENCE_S
        ask = AskCancel(session=one.session, ticket=one.ticket, generation=one.generation, reason=why)
        self.apply(self.control_client, ask)

    def give_up(self, one: Incoming, why: str) -> None:
        if not one.end:
            one.end = why
            if not self.direct:
                self.given_up[one.serial] = one
            self.apply(self.receiver, CancelReceive(seq=0, request=one.serial))

    def give_back(self, one: Incoming) -> None:
        """From here on a byte that is written is found by check()."""
        slots = [one.slot] if one.slot >= 0 else []
        poison(self.store, one.pages, slots)
        self.free += one.pages
        self.free_slots += slots

    def finish(self, one: Incoming) -> None:
        """Nothing writes for it any more, on either side."""
        if self.open.pop(one.serial, None) is not None:
            self.ended.append(one)
            if self.direct and one.end != "arrived":
                self.give_back(one)

    def turn(self) -> None:
        super().turn()
        for one in list(self.open.values()):
            if one.deadline <= self.world.network.now:
                self.cancel(one, "timeout")

    def check(self) -> None:
        """G2: no page was written that no request waits for."""
        given_back = [(data, self.free) for data in paged(self.store)]
        if self.free_slots:
            given_back.append((self.store.tensors[STATE], self.free_slots))
        for data, places in given_back:
            free = data.take(places, axis=0).tobytes()
            assert free == POISONED[: len(free)], "a page was written after it was given back (G2)"

    def deadlines(self) -> list[float]:
        return [one.deadline for one in self.open.values()]
