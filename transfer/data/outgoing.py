"""Records of KV on its way to peers: sessions with a lane per peer stage, requests, chunks, and the parts of chunks.

    OutSession ──► Lane ──queue, in flight──► OutPart ──► OutChunk ──► OutgoingSends (the request)

A peer that splits layers or heads otherwise has several lanes in its session, one for each of its stages that shares KV
with this stage. A chunk goes out in parts, one per lane. outbound.py changes these records. Pure.
"""

from collections import deque
from dataclasses import dataclass, field

from headrace.core.messages.orders import SendChunk
from headrace.core.trace import Outcome, TransferTrace
from headrace.core.types.kv.backends import ZMQ, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import Handle, RemotePages, RemoteWrite
from headrace.transfer.protocol.messages import Chunk

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
    """Of its write, and of the frames of all its transmissions: a zmq.MessageTracker is done when libzmq has let go of
    a frame's memory."""
    sent_at: float = 0.0
    """Time of the last transmission, seconds."""
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
        """Whether libzmq holds none of its frames, and nothing of it is being written."""
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
