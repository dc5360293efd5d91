"""A prefill server as simple as the protocol's promises allow: ControlServer and Sender, with deadlines and a pool.

Pages are overwritten as soon as they may be, so a byte that is read too late is found.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer, ReleaseRequest, SendChunk
from headrace.core.messages.peers import (
    EndPeer,
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReserved,
    TellCancelled,
    TellFailed,
    TellFinished,
)
from headrace.core.messages.stage_events import ChunkAcked, PeerLost, SendCancelled, SendFailed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import NIXL
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack, unpack
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.control.server import ControlServer
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.layout import pages_for
from headrace.transfer.protocol.matching import BackendOffer
from tests.transfer.harness import scramble
from tests.transfer.memory_agents import VERSION, AgentTransport
from tests.transfer.memory_devices import DevicePool
from tests.transfer.memory_pools import HOST, MemoryTransport
from tests.transfer.memory_zmq import Context
from tests.transfer.world import (
    PAGES,
    PATIENCE_S,
    STATE,
    TIMEOUT,
    Side,
    World,
    all_slots,
    content,
    draft_of,
    poison,
    slots_of,
    state_of,
)


@dataclass(eq=False)
class Outgoing:
    """A reservation at the prefill side. error: what to tell when it is quiet, None for Cancelled."""

    serial: int
    reserved: PeerReserved
    pages: list[int]
    chunks: int
    acked: int = 0
    deadline: float = 0.0
    closing: bool = False
    error: ErrorInfo | None = None
    slot: int = -1
    """Of its states, where there are any."""


class PrefillSide(Side):
    """A control endpoint, a stage's sender, and a pool whose pages are given away as soon as that is allowed."""

    def __init__(self, world: "World", geometry: Geometry) -> None:
        super().__init__(world)
        self.geometry = geometry
        self.store = DevicePool(world.network, geometry, PAGES) if world.devices else ArrayPageStore(geometry, PAGES)
        scramble(self.store, 0)
        self.free, self.free_slots = list(range(PAGES)), all_slots(self.store)
        self.open: dict[int, Outgoing] = {}
        self.serials = 0
        context: Any = Context(world.network)
        self.transport = AgentTransport(world.agents) if world.backend == NIXL else MemoryTransport(world.pools)
        transports = {world.backend: self.transport}
        self.sender = Sender(
            world.config, stage=0, geometry=geometry, store=self.store, context=context, transports=transports
        )
        self.control_server = ControlServer(world.config, context, new_session=world.new_id)
        ports = (self.sender.port,)
        self.control_server.ready(
            BackendOffer(
                instance=world.new_id(),
                fingerprint="model",
                geometries=(geometry,),
                data_ports=ports,
                max_model_len=1024,
                backends=(world.backend,),
                shared_memory=frozenset([HOST]),
                nixl=frozenset([VERSION]),
            )
        )
        self.ports = [self.control_server, self.sender]

    def handle(self, event: Any) -> None:
        match event:
            case PeerJoined():
                self.admit(event)
            case PeerGone(session=session):
                self.apply(self.sender, DropPeer(seq=0, session=session))
                for one in [one for one in self.open.values() if one.reserved.session == session]:
                    self.close(one, TIMEOUT)
            case PeerReserved():
                self.reserve(event)
            case PeerCancelled(session=session, ticket=ticket, generation=generation):
                name = session, ticket, generation
                for one in list(self.open.values()):
                    if one.reserved.key == name:
                        self.close(one, None)
            case ChunkAcked(request=request) if request in self.open and not self.open[request].closing:
                one = self.open[request]
                one.acked, one.deadline = one.acked + 1, self.world.network.now + PATIENCE_S
                if one.acked == one.chunks:
                    self.tell(one, TellFinished)
            case PeerLost(session=session, reason=reason):
                self.apply(self.control_server, EndPeer(session=session, reason=reason))
            case SendFailed(request=request, code=code, message=text) if request in self.open:
                changed = code == "checksum_mismatch" and not self.world.network.damaged
                assert not changed, "source pages have changed before they were acknowledged (G3)"
                self.close(self.open[request], ErrorInfo(code=code, message=text, status=502))
            case SendCancelled(request=request) if request in self.open:
                one = self.open[request]
                assert not self.world.network.flying(*one.reserved.key[1:]), "not quiet (G2)"
                pages = self.transport.opened.get(one.reserved.session)
                if pages is not None and not pages.closed:
                    reserved = one.reserved.reservation
                    own = set(unpack(reserved.pages))
                    busy = [place for place, count in pages.busy.items() if count]
                    assert not any(
                        number == reserved.slot if tensor == STATE else number in own for tensor, number in busy
                    ), "still writes (G2)"
                if one.error is None:
                    self.tell(one, TellCancelled)
                else:
                    self.tell(one, TellFailed, error=one.error)

    def check(self) -> None:
        """G7: no more bytes are under way than a peer's window lets, or one part that is larger than it."""
        for lane in self.sender._outbound.lanes():
            over = lane.unacked_bytes > lane.window_bytes and len(lane.in_flight) > 1
            assert not over, f"{lane.unacked_bytes} bytes are unacknowledged in a window of {lane.window_bytes} (G7)"

    def admit(self, joined: PeerJoined) -> None:
        assert joined.terms.backend == self.world.backend
        self.apply(self.sender, AdmitPeer(seq=0, terms=joined.terms))

    def kill(self) -> None:
        super().kill()
        self.transport.kill()

    def reserve(self, reserved: PeerReserved) -> None:
        reservation = reserved.reservation
        tokens, cached = reservation.prompt_tokens, reservation.cached_tokens
        needed = pages_for(self.geometry.page_size, 0, tokens)
        self.serials += 1
        world, random = self.world, self.world.network.random
        edges = sorted({cached, tokens, *(random.randrange(cached, tokens) for _ in range(random.randrange(3)))})
        one = Outgoing(self.serials, reserved, [], len(edges) - 1, deadline=world.network.now + PATIENCE_S)
        self.open[one.serial] = one
        if needed > len(self.free) or (self.geometry.state_bytes and not self.free_slots):
            self.close(one, ErrorInfo(code="no_pages", message="no pages", status=503))
            return
        one.pages, self.free = self.free[:needed], self.free[needed:]
        one.slot = self.free_slots.pop(0) if self.geometry.state_bytes else -1
        for data, place in state_of(self.store, one.slot, tokens):
            data[...] = content(reservation.ticket, reservation.generation, place, data.size).reshape(data.shape)
        for position in range(tokens):
            page, slot = one.pages[position // self.geometry.page_size], position % self.geometry.page_size
            for data, place in slots_of(self.store, page, slot, position):
                data[...] = content(reservation.ticket, reservation.generation, place, data.size).reshape(data.shape)
        for number, (start, end) in enumerate(pairwise(edges)):
            delay = random.uniform(0, 0.5)
            world.network.after(delay * number, lambda n=number, s=start, e=end: self.send(one, n, s, e))  # type: ignore[misc]

    def send(self, one: Outgoing, number: int, start: int, end: int) -> None:
        if self.open.get(one.serial) is not one or one.closing or self not in self.world.sides:
            return
        session, reserved = one.reserved.session, one.reserved.reservation
        first, size = start // self.geometry.page_size, self.world.peer_page_size
        skip = start // size - reserved.cached_tokens // size
        order = SendChunk(
            seq=0, after=0, request=one.serial, session=session, ticket=reserved.ticket,
            generation=reserved.generation, chunk=number, start=start, count=end - start,
            pages=pack(one.pages[first : first + pages_for(self.geometry.page_size, start, end - start)]),
            dst_pages=pack(unpack(reserved.pages)[skip : skip + pages_for(size, start, end - start)]),
            row=0, dst_row=reserved.row, slot=one.slot, dst_slot=reserved.slot,
            last=FirstToken(
                token=7, prompt_tokens=reserved.prompt_tokens, cached_tokens=0,
                draft=draft_of(reserved.ticket, reserved.generation, reserved.prompt_tokens, reserved.draft),
            ) if number + 1 == one.chunks else None,
        )  # fmt: skip
        self.apply(self.sender, order)

    def close(self, one: Outgoing, error: ErrorInfo | None) -> None:
        """Make it quiet; then it is told, and its pages are free."""
        if one.closing:
            one.error = one.error and error  # a CancelSend that comes meanwhile is the answer that is waited for
            return
        one.closing, one.error = True, error
        self.apply(self.sender, CancelSend(seq=0, request=one.serial))

    def tell(self, one: Outgoing, kind: Any, **fields: Any) -> None:
        del self.open[one.serial]
        slots = [one.slot] if one.slot >= 0 else []
        poison(self.store, one.pages, slots)
        self.free += one.pages
        self.free_slots += slots
        self.apply(self.sender, ReleaseRequest(seq=0, request=one.serial))
        names = dict(zip(("session", "ticket", "generation"), one.reserved.key, strict=True))
        self.apply(self.control_server, kind(**names, **fields))

    def turn(self) -> None:
        super().turn()
        for one in list(self.open.values()):
            if one.deadline <= self.world.network.now and not one.closing:
                self.close(one, TIMEOUT)

    def deadlines(self) -> list[float]:
        return [one.deadline for one in self.open.values() if not one.closing]
