"""What a stage still owes its peers: queues, windows, and who may touch which page. Pure.

             ┌────────── connection lost: back to the front ─────────┐
             ▼                                                       │
    Send ─► queue ──window open──► in flight ──Ack──► settling ──no frame of it is held──► Acked
             │                         │
             └──────── Cancel ─────────┴──────────► cancelling ──no frame of it is held──► Quiet

The window bounds the bytes in flight of one session. A chunk larger than the window goes when nothing else is in
flight, so a small window slows a peer down but cannot stop it. A cancelled chunk that was sent counts until the
peer answers it or its connection ends: a peer that does not read gains nothing by cancelling.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.orders import AdmitPeer, Send

Key = tuple[str, int, int]  # ticket, generation, chunk


class Handle(Protocol):
    """Tells when libzmq has let go of a frame's memory (zmq.MessageTracker)."""

    @property
    def done(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Outgoing:
    """One request on its way out, queued for one session. Only while it is open are its chunks sent. sent: chunks
    that libzmq has seen and that are neither acknowledged nor known to be free."""

    request: int
    session: "OutSession | None" = None
    open: bool = True
    released: bool = False
    sent: list["OutChunk"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OutChunk:
    """One Send order. row: its metadata row, b"" but in the last chunk. handles: of the frames of all its
    transmissions."""

    order: Send
    owner: Outgoing
    payload_bytes: int
    row: bytes
    handles: list[Handle] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.order.ticket, self.order.generation, self.order.chunk

    @property
    def wire_bytes(self) -> int:
        """What counts against the window."""
        return self.payload_bytes + len(self.row)

    @property
    def free(self) -> bool:
        """Whether libzmq holds none of its frames."""
        self.handles = [handle for handle in self.handles if not handle.done]
        return not self.handles


@dataclass(slots=True, eq=False)
class OutSession:
    """A peer that may attach. route: its connection of the moment. checksum: whether chunks carry one."""

    session: str
    page_size: int
    window_bytes: int
    route: bytes | None = None
    checksum: bool = True
    unacked_bytes: int = 0
    queue: deque[OutChunk] = field(default_factory=deque)
    in_flight: dict[Key, OutChunk] = field(default_factory=dict)


class Settled(NamedTuple):
    """Chunks whose Acked and requests whose Quiet may now be reported."""

    acked: list[OutChunk]
    quiet: list[int]


class Outbound:
    """The sessions and requests of one stage."""

    def __init__(self) -> None:
        self._sessions: dict[str, OutSession] = {}
        self._by_route: dict[bytes, OutSession] = {}
        self._requests: dict[int, Outgoing] = {}
        self._settling: list[OutChunk] = []
        self._cancelling: list[Outgoing] = []

    @property
    def unacked_bytes(self) -> int:
        return sum(session.unacked_bytes for session in self._sessions.values())

    @property
    def queued_chunks(self) -> int:
        return sum(len(session.queue) for session in self._sessions.values())

    @property
    def unsettled(self) -> bool:
        """Whether settle() waits for libzmq."""
        return bool(self._settling or self._cancelling)

    def admit(self, order: AdmitPeer) -> None:
        self._sessions.setdefault(
            order.session, OutSession(order.session, order.geometry.page_size, order.window_bytes)
        )

    def drop(self, session: str) -> None:
        """The session has ended. Its requests stay known until they are cancelled or released."""
        ended = self._sessions.pop(session, None)
        if ended is not None and ended.route is not None:
            del self._by_route[ended.route]

    def session(self, session: str) -> OutSession | None:
        return self._sessions.get(session)

    def session_at(self, route: bytes) -> OutSession | None:
        return self._by_route.get(route)

    def attach(self, session: OutSession, route: bytes) -> None:
        """Use this connection from now on; what was in flight on an earlier one is sent again."""
        if session.route == route:
            return
        self.detach(session)
        session.route = route
        self._by_route[route] = session

    def detach(self, session: OutSession) -> None:
        """The connection is gone: nothing is in flight, and chunks not acknowledged are queued again, in order."""
        if session.route is not None:
            del self._by_route[session.route]
            session.route = None
        session.queue.extendleft(reversed([chunk for chunk in session.in_flight.values() if chunk.owner.open]))
        session.in_flight.clear()
        session.unacked_bytes = 0

    def enqueue(self, session: OutSession, order: Send, payload_bytes: int, row: bytes) -> None:
        """Queue a chunk, unless its request has been cancelled or has failed: Cancel overtakes Sends that wait for
        their pages to be computed."""
        owner = self._requests.setdefault(order.request, Outgoing(order.request))
        owner.session = session
        if owner.open:
            session.queue.append(OutChunk(order, owner, payload_bytes, row))

    def next_chunk(self, session: OutSession) -> OutChunk | None:
        """The next chunk to put on the session's connection, now counted as in flight."""
        if session.route is None or not session.queue:
            return None
        chunk = session.queue[0]
        if session.unacked_bytes and session.unacked_bytes + chunk.wire_bytes > session.window_bytes:
            return None
        session.queue.popleft()
        session.in_flight[chunk.key] = chunk
        session.unacked_bytes += chunk.wire_bytes
        if chunk not in chunk.owner.sent:
            chunk.owner.sent.append(chunk)
        return chunk

    def answered(self, session: OutSession, key: Key) -> OutChunk | None:
        """The peer has answered a chunk: its bytes leave the window. None when it was not in flight."""
        chunk = session.in_flight.pop(key, None)
        if chunk is not None:
            session.unacked_bytes -= chunk.wire_bytes
        return chunk

    def acked(self, chunk: OutChunk) -> None:
        """Acked will be reported by settle(): never before the pages are free of readers, whatever the peer says."""
        if chunk.owner.open:
            self._settling.append(chunk)

    def fail(self, request: int) -> bool:
        """Send nothing more for a request. False when it was closed already."""
        owner = self._requests.setdefault(request, Outgoing(request))
        was_open, owner.open = owner.open, False
        if owner.session is not None:
            owner.session.queue = deque(chunk for chunk in owner.session.queue if chunk.owner is not owner)
        return was_open

    def cancel(self, request: int) -> None:
        """Send nothing more for a request; settle() reports it quiet."""
        self.fail(request)
        owner = self._requests[request]
        if owner not in self._cancelling:
            self._cancelling.append(owner)

    def release(self, request: int) -> None:
        """Every Send of the request has been seen: a cancelled one need not be remembered any more."""
        owner = self._requests.get(request)
        if owner is None:
            return
        owner.released = True
        if owner not in self._cancelling:
            del self._requests[request]

    def settle(self) -> Settled:
        """Take out what libzmq has let go of."""
        acked = [chunk for chunk in self._settling if chunk.owner.open and chunk.free]
        self._settling = [chunk for chunk in self._settling if chunk.owner.open and chunk.handles]
        for chunk in acked:
            chunk.owner.sent.remove(chunk)
        quiet = [owner for owner in self._cancelling if all(chunk.free for chunk in owner.sent)]
        for owner in quiet:
            owner.sent.clear()
            self._cancelling.remove(owner)
            if owner.released:
                del self._requests[owner.request]
        return Settled(acked, [owner.request for owner in quiet])
