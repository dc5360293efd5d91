"""What a stage still owes its peers: queues, windows, and who may touch which page. Pure.

             ┌────────── connection lost: back to the front ─────────┐
             ▼                                                       │
    SendChunk ─► queue ──window open──► in flight ──Ack──► settling ──no frame of it is held──► Acked, after the last
    part
             │                         │
             └──────── Cancel ─────────┴──────────► cancelling ──no frame of it is held──► Quiet
                                                                 and no write is under way

Where bytes are written into the peer's pool, a part in flight is written first and announced then, on whichever
connection there is; it is never written again, for the peer may use its pages once it has answered.

A peer that splits layers or heads otherwise has several lanes here, one for each of its stages that shares KV with this
one. A chunk goes out in parts, each lane's own layers and heads on its own connection; it is acknowledged when all are.

The window bounds the bytes in flight of one lane, PARTS_IN_FLIGHT their number. A part larger than the window goes when
nothing else is in flight, so a small window slows a peer down but cannot stop it. A cancelled part that was sent counts
until the peer answers it or its connection ends: a peer that does not read gains nothing by cancelling.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.messages.orders import AdmitPeer, SendChunk
from headrace.core.types.backends import ZMQ, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.transfer.backends.base import Handle, RemotePages, RemoteWrite
from headrace.transfer.protocol.layout import overlap
from headrace.transfer.protocol.messages import Chunk

PARTS_IN_FLIGHT = 1024  # of one lane, however small they are

Key = tuple[str, int, int]  # ticket, generation, chunk


@dataclass(slots=True, eq=False)
class OutgoingSends:
    """One request on its way out, queued for one session. Only while it is open are its parts sent. sent: parts
    that libzmq has seen and that are neither acknowledged nor known to be free."""

    request: int
    session: "OutSession | None" = None
    open: bool = True
    released: bool = False
    sent: list["OutPart"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OutChunk:
    """One SendChunk order. row: its metadata row, b"" but in the last chunk; every part carries it. bytes: of the
    payload, over all parts. unsettled: parts that are not acknowledged or that libzmq still holds."""

    order: SendChunk
    owner: OutgoingSends
    row: bytes
    bytes: int
    unsettled: int


@dataclass(slots=True, eq=False)
class OutPart:
    """What one lane gets of a chunk. handles: of its write, and of the frames of all its transmissions (a
    zmq.MessageTracker tells when libzmq has let go of a frame's memory). sent_at: when the last of these was.
    write: of its bytes into the peer's pages. checksum: of what was written."""

    chunk: OutChunk
    payload_bytes: int
    handles: list[Handle] = field(default_factory=list)
    sent_at: float = 0.0
    write: RemoteWrite | None = None
    checksum: int | None = None

    @property
    def owner(self) -> OutgoingSends:
        """The sends of its request."""
        return self.chunk.owner

    @property
    def key(self) -> Key:
        """Ticket, generation and chunk number, as in its acknowledgement."""
        order = self.chunk.order
        return order.ticket, order.generation, order.chunk

    @property
    def wire_bytes(self) -> int:
        """What counts against the window."""
        return self.payload_bytes + len(self.chunk.row)

    def header(self, digest: int | None) -> Chunk:
        """What is said of it on its connection. digest: of its row and payload, where there is to be one."""
        order = self.chunk.order
        return Chunk(
            ticket=order.ticket,
            generation=order.generation,
            chunk=order.chunk,
            start=order.start,
            count=order.count,
            pages=order.dst_pages,
            row=order.dst_row,
            payload_bytes=self.payload_bytes,
            checksum=digest,
            total=order.chunk + 1 if order.last else 0,
            written=self.write is not None,
        )

    @property
    def free(self) -> bool:
        """Whether libzmq holds none of its frames, and nothing of it is being written."""
        self.handles = [handle for handle in self.handles if not handle.done]
        return not self.handles


@dataclass(slots=True, eq=False)
class Lane:
    """One stage of a peer. stage: its number. destination: its pool. part: the layers and heads of this stage that
    it takes. backend: how bytes are to go there. route: its connection of the moment. checksum: whether chunks carry
    one. memory: how its pool may be written; remote: that pool, once it has been opened. writing: parts in flight that
    are not announced yet. lost: a write has not come through, and never will."""

    stage: int
    destination: Geometry
    part: Geometry
    window_bytes: int
    backend: str = ZMQ
    route: bytes | None = None
    checksum: bool = True
    memory: PoolMemory | None = None
    remote: RemotePages | None = None
    unacked_bytes: int = 0
    queue: deque[OutPart] = field(default_factory=deque)
    in_flight: dict[Key, OutPart] = field(default_factory=dict)
    writing: list[OutPart] = field(default_factory=list)
    lost: bool = False


@dataclass(slots=True, eq=False)
class OutSession:
    """A peer that may attach. backend: how bytes go to it. lanes: by its stage."""

    session: str
    page_size: int
    backend: str
    lanes: dict[int, Lane]


class Settled(NamedTuple):
    """Chunks whose Acked and requests whose Quiet may now be reported."""

    acked: list[OutChunk]
    quiet: list[int]


class Outbound:
    """The sessions and requests of one stage. geometry: of its pool."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._sessions: dict[str, OutSession] = {}
        self._by_route: dict[bytes, Lane] = {}
        self._requests: dict[int, OutgoingSends] = {}
        self._settling: list[OutPart] = []
        self._cancelling: list[OutgoingSends] = []

    @property
    def unacked_bytes(self) -> int:
        """Payload sent and not acknowledged, over all peers."""
        return sum(lane.unacked_bytes for lane in self.lanes())

    @property
    def queued_chunks(self) -> int:
        """Chunks that wait for a window or a connection."""
        return sum(len(lane.queue) for lane in self.lanes())

    @property
    def unsettled(self) -> bool:
        """Whether settle() or written() wait for something that does not wake us."""
        return bool(self._settling or self._cancelling or self.writing)

    @property
    def writing(self) -> bool:
        """Whether bytes are on their way into a peer's pages."""
        return any(lane.writing for lane in self._by_route.values())

    def admit(self, order: AdmitPeer) -> None:
        """Let the peer of a session attach."""
        if order.session in self._sessions:
            return
        lanes = {}
        for stage, theirs in enumerate(order.geometries):
            part = overlap(self._geometry, theirs)
            if part is not None:
                memory = order.memory[stage] if order.backend != ZMQ and order.memory else None
                lanes[stage] = Lane(stage, theirs, part, order.window_bytes, order.backend, memory=memory)
        self._sessions[order.session] = OutSession(order.session, order.geometries[0].page_size, order.backend, lanes)

    def drop(self, session: str) -> list[Lane]:
        """The session has ended. Its requests stay known until they are cancelled or released. Returns its lanes."""
        ended = self._sessions.pop(session, None)
        lanes = list(ended.lanes.values()) if ended is not None else []
        for lane in lanes:
            if lane.route is not None:
                del self._by_route[lane.route]
        return lanes

    def lanes(self) -> list[Lane]:
        """Of all sessions."""
        return [lane for session in self._sessions.values() for lane in session.lanes.values()]

    def session(self, session: str) -> OutSession | None:
        """The session of this name; None if there is none."""
        return self._sessions.get(session)

    def lane_at(self, route: bytes) -> Lane | None:
        """The lane that is attached on a connection; None if there is none."""
        return self._by_route.get(route)

    def attach(self, lane: Lane, route: bytes) -> list[bytes]:
        """Use this connection from now on; what was in flight on an earlier one is sent again. Returns the connection
        that serves no lane any more, if there is one."""
        if lane.route == route:
            return []
        left = [lane.route] if lane.route is not None else []
        self.detach(lane)
        other = self._by_route.get(route)
        if other is not None:  # a connection serves one lane
            self.detach(other)
        lane.route = route
        self._by_route[route] = lane
        return left

    def detach(self, lane: Lane) -> None:
        """The connection is gone: nothing is in flight, and parts not acknowledged are queued again, in order."""
        if lane.route is not None:
            del self._by_route[lane.route]
            lane.route = None
        lane.queue.extendleft(reversed([part for part in lane.in_flight.values() if part.owner.open]))
        lane.in_flight.clear()
        lane.writing.clear()
        lane.unacked_bytes = 0

    def in_flight(self) -> Iterator[tuple[Lane, OutPart]]:
        """Parts that were sent and not answered."""
        for lane in self.lanes():
            for part in lane.in_flight.values():
                yield lane, part

    def enqueue(self, session: OutSession, order: SendChunk, row: bytes) -> None:
        """Queue a chunk on every lane, unless its request has been cancelled or has failed: Cancel overtakes Sends that
        wait for their pages to be computed."""
        owner = self._requests.setdefault(order.request, OutgoingSends(order.request))
        owner.session = session
        if not owner.open:
            return
        lanes = session.lanes.values()
        token_bytes = sum(lane.part.token_bytes for lane in lanes)
        chunk = OutChunk(order, owner, row, order.count * token_bytes, len(lanes))
        for lane in lanes:
            lane.queue.append(OutPart(chunk, order.count * lane.part.token_bytes))

    def next_part(self, lane: Lane) -> OutPart | None:
        """The next part to put on the lane's connection, now counted as in flight."""
        if lane.route is None or not lane.queue or len(lane.in_flight) >= PARTS_IN_FLIGHT:
            return None
        part = lane.queue[0]
        if lane.unacked_bytes and lane.unacked_bytes + part.wire_bytes > lane.window_bytes:
            return None
        lane.queue.popleft()
        lane.in_flight[part.key] = part
        lane.unacked_bytes += part.wire_bytes
        if part not in part.owner.sent:
            part.owner.sent.append(part)
        return part

    def lost(self) -> list[tuple[str, str]]:
        """Sessions through which a write was lost, each once, and how. Nobody can say when the last of its bytes will
        have come to the peer's pages, so nothing of the session can be called quiet any more."""
        found = []
        for session in self._sessions.values():
            for lane in session.lanes.values():
                reasons = [part.write.lost for part in lane.writing if part.write is not None and part.write.lost]
                if reasons and not lane.lost:
                    lane.lost = True
                    found.append((session.session, reasons[0]))
        return found

    def written(self) -> list[tuple[Lane, OutPart]]:
        """Take out what has come into the peer's pages and is to be announced."""
        announced = []
        for lane in self._by_route.values():
            over = [part for part in lane.writing if part.write is not None and part.write.done]
            lane.writing = [part for part in lane.writing if part not in over]
            for part in over:
                if part.owner.open:
                    announced.append((lane, part))
                else:
                    self.answered(lane, part.key)  # the peer will not hear of it, so it cannot answer
        return announced

    def answered(self, lane: Lane, key: Key) -> OutPart | None:
        """The peer has answered a part: its bytes leave the window. None when it was not in flight."""
        part = lane.in_flight.pop(key, None)
        if part is not None:
            lane.unacked_bytes -= part.wire_bytes
        return part

    def acked(self, part: OutPart) -> None:
        """Acked will be reported by settle(): never before the pages are free of readers, whatever the peer says."""
        if part.owner.open:
            self._settling.append(part)

    def fail(self, request: int) -> bool:
        """SendChunk nothing more for a request. False when it was closed already."""
        owner = self._requests.setdefault(request, OutgoingSends(request))
        was_open, owner.open = owner.open, False
        for lane in owner.session.lanes.values() if owner.session is not None else ():
            lane.queue = deque(part for part in lane.queue if part.owner is not owner)
        return was_open

    def cancel(self, request: int) -> None:
        """SendChunk nothing more for a request; settle() reports it quiet."""
        self.fail(request)
        owner = self._requests[request]
        if owner not in self._cancelling:
            self._cancelling.append(owner)

    def release(self, request: int) -> None:
        """Every SendChunk of the request has been seen: a cancelled one need not be remembered any more."""
        owner = self._requests.get(request)
        if owner is None:
            return
        owner.released = True
        if owner not in self._cancelling:
            del self._requests[request]

    def settle(self) -> Settled:
        """Take out what libzmq has let go of."""
        free = [part for part in self._settling if part.owner.open and part.free]
        self._settling = [part for part in self._settling if part.owner.open and part.handles]
        acked = []
        for part in free:
            part.owner.sent.remove(part)
            part.chunk.unsettled -= 1
            if not part.chunk.unsettled:
                acked.append(part.chunk)
        quiet = [owner for owner in self._cancelling if all(part.free for part in owner.sent)]
        for owner in quiet:
            owner.sent.clear()
            self._cancelling.remove(owner)
            if owner.released:
                del self._requests[owner.request]
        return Settled(acked, [owner.request for owner in quiet])
