"""Per-peer send queues of a stage: flow-control windows, acknowledgements, and when pages may be reused. Pure.

    OutSession ──► Lane ──queue, in flight──► OutPart ──► OutChunk ──► OutgoingSends (the request)

A peer that splits layers or heads otherwise has several lanes in its session, one for each of its stages that shares KV
with this stage. A chunk goes out in parts, each lane's own layers and heads on its own connection. It is acknowledged
when all of them are:

                 ┌────────── connection lost: back to the front ─────────┐
                 ▼                                                       │
    SendChunk ─► queue ──window open──► in flight ──Ack──► settling ──no frame of it is held──► ChunkAcked, after the
                 │                         │                                                    last part
                 └────── CancelSend ───────┴─────────► cancelling ──no frame of it is held──► SendCancelled
                                                                    and no write is under way

The pages of a part are brought to host memory first, which a GPU's pool takes some time and room for. Where bytes are
written into the peer's pool, a part in flight is written first and announced then, on the connection
that is attached at that time. It is never written again: the peer may use its pages once it has answered.

The window bounds the bytes in flight of one lane, PARTS_IN_FLIGHT their number. A part larger than the window goes when
nothing else is in flight, so a small window slows a peer down but cannot stop it. A cancelled part that was sent counts
until the peer answers it or its connection ends: a peer that does not read gains nothing by cancelling.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.messages.orders import SendChunk
from headrace.core.trace import Outcome, TransferTrace
from headrace.core.types.kv.backends import ZMQ, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.backends.base import RemotePages, RemoteWrite
from headrace.transfer.protocol.layout import overlap
from headrace.transfer.protocol.messages import Chunk
from headrace.transfer.protocol.page_store import Handle, PendingRead

PARTS_IN_FLIGHT = 1024  # of one lane, however small they are
Key = tuple[str, int, int]  # ticket, generation, chunk


@dataclass(slots=True, eq=False)
class OutgoingSends:
    """The sends of one request, all to one session."""

    request: int
    """Serial of the request, as in orders."""
    session: "OutSession | None" = None
    """Where its chunks go; None until the first one is queued."""
    open: bool = True
    """Whether its parts may still be sent; False once it was cancelled or has failed."""
    released: bool = False
    """Whether all its orders were seen, so that it need not be remembered after it was cancelled."""
    sent: list["OutPart"] = field(default_factory=list)
    """Parts given to libzmq or to a write that are neither acknowledged nor known to be free."""


@dataclass(slots=True, eq=False)
class OutChunk:
    """One SendChunk order."""

    order: SendChunk
    owner: OutgoingSends
    row: bytes
    """Metadata row of the last chunk, which every part of it carries; b"" in other chunks."""
    draft: bytes
    """Draft frame of the last chunk, likewise; b"" where there is none."""
    bytes: int
    """Payload over all parts."""
    unsettled: int
    """Number of parts that are not acknowledged or that libzmq still holds."""


@dataclass(slots=True, eq=False)
class OutPart:
    """What one lane gets of a chunk: the layers and heads that the lane's stage takes."""

    chunk: OutChunk
    payload_bytes: int
    handles: list[Handle] = field(default_factory=list)
    """Of its read and its write, and of the frames of all its transmissions: a zmq.MessageTracker is done when libzmq
    has let go of a frame's memory."""
    sent_at: float = 0.0
    """Time of the last transmission, seconds."""
    read: PendingRead | None = None
    """Its pages in host memory, once they were asked for and until they were acknowledged."""
    write: RemoteWrite | None = None
    """Completion of the write into the peer's pages, once it was started."""
    checksum: int | None = None
    """Of what was written, where the lane has checksums."""

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
        """Bytes that count against the window: payload, metadata row and draft frame."""
        return self.payload_bytes + len(self.chunk.row) + len(self.chunk.draft)

    def header(self, digest: int | None) -> Chunk:
        """The message that announces it. digest: checksum of its row and payload; None where the lane has none."""
        order = self.chunk.order
        return Chunk(
            ticket=order.ticket,
            generation=order.generation,
            chunk=order.chunk,
            start=order.start,
            count=order.count,
            pages=order.dst_pages,
            row=order.dst_row,
            slot=order.dst_slot,
            payload_bytes=self.payload_bytes,
            checksum=digest,
            total=order.chunk + 1 if order.last else 0,
            written=self.write is not None,
            draft_bytes=len(self.chunk.draft),
        )

    def trace(self, peer_stage: int, outcome: Outcome, now: float) -> TransferTrace:
        """Its last transmission as GET /debug/trace reports it. now: when it was answered, seconds."""
        order = self.chunk.order
        return TransferTrace(
            request=order.request,
            ticket=order.ticket,
            chunk=order.chunk,
            peer_stage=peer_stage,
            bytes=self.payload_bytes,
            sent=self.sent_at,
            ended=now,
            outcome=outcome,
        )

    @property
    def free(self) -> bool:
        """Whether libzmq holds none of its frames, and nothing of it is being read or written."""
        self.handles = [handle for handle in self.handles if not handle.done]
        return not self.handles


@dataclass(slots=True, eq=False)
class Lane:
    """One stage of a peer: its connection, its window, and the parts that are queued or in flight."""

    stage: int
    """Rank of the peer's stage."""
    destination: Geometry
    """Of that stage's pool."""
    part: Geometry
    """This stage's geometry, cut to the layers and heads that the peer's stage takes."""
    window_bytes: int
    """Bytes that may be in flight."""
    backend: str = ZMQ
    """How bytes are to go there."""
    route: bytes | None = None
    """ZMQ routing id of the connection that is attached; None when none is."""
    checksum: bool = True
    """Whether chunks carry a checksum."""
    memory: PoolMemory | None = None
    """How the peer's pool may be written; None after the first attach, or where it may not."""
    remote: RemotePages | None = None
    """The peer's pool, while it is open for writing; None where payload goes in frames."""
    unacked_bytes: int = 0
    """Bytes in flight, as the window counts them."""
    queue: deque[OutPart] = field(default_factory=deque)
    """Parts that wait for the window or a connection."""
    in_flight: dict[Key, OutPart] = field(default_factory=dict)
    """Parts that were sent and are not answered."""
    reading: list[OutPart] = field(default_factory=list)
    """Parts in flight whose pages are not in host memory yet; some wait for room there."""
    writing: list[OutPart] = field(default_factory=list)
    """Parts in flight whose write is not done, so that they are not announced yet."""
    lost: bool = False
    """Whether a write cannot complete any more, and was reported."""


@dataclass(slots=True, eq=False)
class OutSession:
    """A peer that may attach."""

    session: str
    """Secret of the session."""
    page_size: int
    """Tokens per page of the peer's pools."""
    backend: str
    """How bytes go to it."""
    lanes: dict[int, Lane]
    """By rank of the peer's stage; only stages that share layers and heads with this one."""


class Settled(NamedTuple):
    """Chunks and requests whose pages neither libzmq nor a write reads any more."""

    acked: list[OutChunk]
    """Report as ChunkAcked."""
    cancelled: list[int]
    """Serials of requests; report as SendCancelled."""


class Outbound:
    """The sessions and requests of one stage.

    Args:
        geometry: of the stage's pool.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._sessions: dict[str, OutSession] = {}
        self._by_route: dict[bytes, Lane] = {}
        self._requests: dict[int, OutgoingSends] = {}  # by serial
        self._settling: list[OutPart] = []  # acknowledged, and not yet known to be free
        self._cancelling: list[OutgoingSends] = []  # cancelled, and not yet reported

    @property
    def unacked_bytes(self) -> int:
        """Bytes sent and not acknowledged, over all peers."""
        return sum(lane.unacked_bytes for lane in self.lanes())

    @property
    def queued_chunks(self) -> int:
        """Chunks that wait for a window or a connection."""
        return sum(len(lane.queue) for lane in self.lanes())

    @property
    def unsettled(self) -> bool:
        """Whether settle() or copied() will have something to report whose completion does not wake the I/O
        thread."""
        return bool(self._settling or self._cancelling or self.copying)

    @property
    def copying(self) -> bool:
        """Whether bytes are on their way to host memory, or into a peer's pages."""
        return any(lane.reading or lane.writing for lane in self._by_route.values())

    def admit(self, terms: PeerTerms) -> None:
        """Let the peer of a session attach."""
        if terms.session in self._sessions:
            return
        lanes = {}
        for stage, theirs in enumerate(terms.geometries):
            part = overlap(self._geometry, theirs)
            if part is not None:
                memory = terms.memory[stage] if terms.backend != ZMQ and terms.memory else None
                lanes[stage] = Lane(stage, theirs, part, terms.window_bytes, terms.backend, memory=memory)
        self._sessions[terms.session] = OutSession(terms.session, terms.geometries[0].page_size, terms.backend, lanes)

    def drop(self, session: str) -> list[Lane]:
        """End a session. Its requests stay known until they are cancelled or released. Returns its lanes."""
        ended = self._sessions.pop(session, None)
        lanes = list(ended.lanes.values()) if ended is not None else []
        for lane in lanes:
            if lane.route is not None:
                del self._by_route[lane.route]
        return lanes

    def lanes(self) -> list[Lane]:
        """The lanes of all sessions."""
        return [lane for session in self._sessions.values() for lane in session.lanes.values()]

    def session(self, session: str) -> OutSession | None:
        """The session of this name; None if there is none."""
        return self._sessions.get(session)

    def lane_at(self, route: bytes) -> Lane | None:
        """The lane that is attached on a connection; None if there is none."""
        return self._by_route.get(route)

    def attach(self, lane: Lane, route: bytes) -> list[bytes]:
        """Use this connection from now on; what was in flight on an earlier one is sent again.

        Returns the connection that serves no lane any more, if there is one."""
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
        """Forget the connection of a lane: parts in flight go back to the front of the queue, in order."""
        if lane.route is not None:
            del self._by_route[lane.route]
            lane.route = None
        lane.queue.extendleft(reversed([part for part in lane.in_flight.values() if part.owner.open]))
        lane.in_flight.clear()
        lane.reading.clear()
        lane.writing.clear()
        lane.unacked_bytes = 0

    def in_flight(self) -> Iterator[tuple[Lane, OutPart]]:
        """Parts that were sent and not answered."""
        for lane in self.lanes():
            for part in lane.in_flight.values():
                yield lane, part

    def enqueue(self, session: OutSession, order: SendChunk, row: bytes, draft: bytes = b"") -> None:
        """Queue a chunk on every lane, unless its request has been cancelled or has failed: CancelSend overtakes
        SendChunk orders that wait for their pages to be computed.

        row: encoded metadata row of the last chunk; b"" for others. draft: its draft frame; b"" where there is none."""
        owner = self._requests.setdefault(order.request, OutgoingSends(order.request))
        owner.session = session
        if not owner.open:
            return
        lanes, end = session.lanes.values(), order.start + order.count
        sizes = [order.count * lane.part.token_bytes for lane in lanes]
        if order.last is not None:
            sizes = [size + lane.part.states_sent(end) for size, lane in zip(sizes, lanes, strict=True)]
        chunk = OutChunk(order, owner, row, draft, sum(sizes), len(lanes))
        for lane, size in zip(lanes, sizes, strict=True):
            lane.queue.append(OutPart(chunk, size))

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
        """Sessions in which a write was lost, each once, and why it was.

        It is unknown when the last of its bytes arrives in the peer's pages, so such a session has to end."""
        found = []
        for session in self._sessions.values():
            for lane in session.lanes.values():
                reasons = [part.write.lost for part in lane.writing if part.write is not None and part.write.lost]
                if reasons and not lane.lost:
                    lane.lost = True
                    found.append((session.session, reasons[0]))
        return found

    def copied(self) -> list[tuple[Lane, OutPart]]:
        """Take out parts whose read or write is done, and those that wait for room, to go on with them now."""
        found = []
        for lane in self._by_route.values():
            if not lane.reading and not lane.writing:
                continue
            read = [part for part in lane.reading if part.read is None or part.read.done]
            written = [part for part in lane.writing if part.write is not None and part.write.done]
            lane.reading = [part for part in lane.reading if part not in read]
            lane.writing = [part for part in lane.writing if part not in written]
            found += [(lane, part) for part in (*read, *written)]
        return found

    def answered(self, lane: Lane, key: Key) -> OutPart | None:
        """Take a part that the peer has answered out of the window. Returns None when it was not in flight."""
        part = lane.in_flight.pop(key, None)
        if part is not None:
            lane.unacked_bytes -= part.wire_bytes
            part.read = None
        return part

    def acked(self, part: OutPart) -> None:
        """Note that the peer has acknowledged a part. settle() reports its chunk once nothing reads its pages."""
        if part.owner.open:
            self._settling.append(part)

    def fail(self, request: int) -> bool:
        """Send nothing more for a request. Returns False when it was closed already."""
        owner = self._requests.setdefault(request, OutgoingSends(request))
        was_open, owner.open = owner.open, False
        for lane in owner.session.lanes.values() if owner.session is not None else ():
            lane.queue = deque(part for part in lane.queue if part.owner is not owner)
        return was_open

    def cancel(self, request: int) -> None:
        """Send nothing more for a request; settle() reports it when its pages are free."""
        self.fail(request)
        owner = self._requests[request]
        if owner not in self._cancelling:
            self._cancelling.append(owner)

    def release(self, request: int) -> None:
        """Note that every SendChunk of a request was seen: once cancelled, it need not be remembered any more."""
        owner = self._requests.get(request)
        if owner is None:
            return
        owner.released = True
        if owner not in self._cancelling:
            del self._requests[request]

    def settle(self) -> Settled:
        """Take out chunks and requests whose pages are free."""
        free = [part for part in self._settling if part.owner.open and part.free]
        self._settling = [part for part in self._settling if part.owner.open and part.handles]
        acked = []
        for part in free:
            part.owner.sent.remove(part)
            part.chunk.unsettled -= 1
            if not part.chunk.unsettled:
                acked.append(part.chunk)
        cancelled = [owner for owner in self._cancelling if all(part.free for part in owner.sent)]
        for owner in cancelled:
            owner.sent.clear()
            self._cancelling.remove(owner)
            if owner.released:
                del self._requests[owner.request]
        return Settled(acked, [owner.request for owner in cancelled])
