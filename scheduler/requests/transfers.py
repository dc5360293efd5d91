"""The transfer of one request's KV cache, out to a decode peer or in from a prefill server."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.messages.peers import ControlServerEffect
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms

TransferKey = tuple[str, str, int]
"""Session, ticket, generation: one use of a ticket."""


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """KV that is sent to a decode peer: what the peer reserved, and which chunks it has acknowledged."""

    session: str
    ticket: str
    generation: int
    dst_pages: "array[int]"
    """Page ids in the peer's pool; the first page holds position cached_tokens."""

    dst_page_size: int
    """Token positions in one page of the peer's pool."""

    dst_row: int
    """Metadata row at the peer."""

    cached_tokens: int
    """Tokens that the peer has already."""

    sent: int
    """Positions below this one have been ordered out or are cached at the peer."""

    draft: DraftTerms = NO_DRAFT
    """Draft data that the peer asks for."""

    chunks: int = 0
    """Chunks that have been ordered out."""

    last_ordered: bool = False
    """The last chunk, which carries the metadata row, has been ordered out."""

    unacked: dict[int, set[int]] = field(default_factory=dict)
    """Stages whose acknowledgement is missing, by chunk."""

    reached_chunk: int = -1
    """The highest chunk that all stages have certainly come to: silence about it is the peer's."""

    silent_since: float = 0.0
    """Time of the last acknowledgement, or of the chunk that was reached after all others were acknowledged."""

    bytes: int = 0
    """Payload bytes that were acknowledged, over all stages."""

    final_reply: ControlServerEffect | None = None
    """How the ticket ended, for the peer. Sent only when no byte can follow it."""

    @property
    def key(self) -> TransferKey:
        """What the peer's messages name this transfer by."""
        return (self.session, self.ticket, self.generation)

    @property
    def unacked_stages(self) -> set[int]:
        """Stages that have come to a chunk whose acknowledgement is missing."""
        return {stage for chunk, stages in self.unacked.items() if chunk <= self.reached_chunk for stage in stages}

    @property
    def awaits_ack(self) -> bool:
        """A chunk that the stages have reached is not acknowledged."""
        return bool(self.unacked) and next(iter(self.unacked)) <= self.reached_chunk

    @property
    def acknowledged(self) -> bool:
        """Every chunk was ordered out and acknowledged by every stage of the peer."""
        return self.last_ordered and not self.unacked

    def dst_pages_until(self, end: int) -> "array[int]":
        """The peer's pages for positions [sent, end); the first page holds position sent."""
        base = self.cached_tokens // self.dst_page_size
        return self.dst_pages[self.sent // self.dst_page_size - base : ceil_div(end, self.dst_page_size) - base]

    def add_chunk(self, end: int, stages: Iterable[int]) -> None:
        """Note that positions [sent, end) were ordered out, as the next chunk. stages: that have to acknowledge it."""
        self.unacked[self.chunks] = set(stages)
        self.chunks += 1
        self.sent = end

    def reach(self, chunk: int, now: float) -> None:
        """Note that every stage has come to this chunk."""
        if not self.awaits_ack:
            self.silent_since = now
        self.reached_chunk = max(self.reached_chunk, chunk)

    def ack(self, chunk: int, stage: int, size: int, now: float) -> bool:
        """Note a stage's acknowledgement of a chunk of size bytes; False when it was not expected."""
        stages = self.unacked.get(chunk, set())
        if stage not in stages:
            return False
        stages.discard(stage)
        if not stages:
            del self.unacked[chunk]
        self.bytes += size
        self.silent_since = now
        return True


class IncomingState(Enum):
    """How far the fetch of one request's KV is.

    PREPARING ──reserve()──► RESERVED ──receive()──► RECEIVED
        │                        │
        └── end(), lose() ───────┴─────────────────► ENDED
    """

    PREPARING = "preparing"  # our stages get ready to receive; the prefill server has not been asked
    RESERVED = "reserved"  # the prefill server has our page ids, and sends
    RECEIVED = "received"  # every stage has all of the KV
    ENDED = "ended"  # the prefill server has ended the ticket or its session: there is nothing left to cancel


class RemoteWriter(Enum):
    """Whether the prefill server itself may write into our pages (backends "shm" and "nixl").

    IDLE ──reserve()──► WRITING ──receive(), end(), stop_writer()──► STOPPED
    """

    NONE = "none"  # chunks come as messages, which our own stages write
    IDLE = "idle"  # it has not been told our page ids
    WRITING = "writing"  # it may write into our pages at any time, whatever our stages are told
    STOPPED = "stopped"  # it has ended the ticket, has written all of it, or can reach our pool no more


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """KV that is fetched from a prefill server. Pages may be given to others only when `remote_writes` is False and no
    stage writes any more."""

    session: str
    ticket: str
    generation: int
    pages: int
    """Pages that are fetched; those found in the prefix cache are not."""

    unready: set[int]
    """Stages that have not answered PrepareReceive."""

    missing: set[int]
    """Stages whose KV has not arrived."""

    writer: RemoteWriter
    state: IncomingState = IncomingState.PREPARING
    bytes: int = 0
    """Payload bytes that have arrived, over all stages."""

    chunks: int = 0
    """Chunks that have arrived, over all stages."""

    @property
    def key(self) -> TransferKey:
        """What the prefill server's messages name this transfer by."""
        return (self.session, self.ticket, self.generation)

    @property
    def remote_writes(self) -> bool:
        """The prefill server may write into our pages now."""
        return self.writer is RemoteWriter.WRITING

    def reserve(self) -> None:
        """The prefill server is told our page ids. Raises ValueError unless the transfer is being prepared."""
        self._leave(IncomingState.PREPARING)
        self.state = IncomingState.RESERVED
        if self.writer is RemoteWriter.IDLE:
            self.writer = RemoteWriter.WRITING

    def receive(self) -> None:
        """All of the KV is here. Raises ValueError unless pages were reserved."""
        self._leave(IncomingState.RESERVED)
        self.state = IncomingState.RECEIVED
        self.stop_writer()

    def end(self) -> None:
        """The prefill server has ended the ticket, and writes nothing more for it."""
        self.state = IncomingState.ENDED
        self.stop_writer()

    def lose(self) -> None:
        """The session has ended. A prefill server that writes by itself may go on until its access is revoked."""
        self.state = IncomingState.ENDED

    def stop_writer(self) -> None:
        """The prefill server cannot write into our pages any more."""
        if self.writer is not RemoteWriter.NONE:
            self.writer = RemoteWriter.STOPPED

    def _leave(self, state: IncomingState) -> None:
        if self.state is not state:
            raise ValueError(f"transfer {self.key} is {self.state.value}, not {state.value}")
