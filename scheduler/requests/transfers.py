"""The transfer of one request's KV cache to a decode peer. The way in: core/incoming.py."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.incoming import TransferKey
from headrace.core.messages.peers import ControlServerEffect
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms


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

    dst_slot: int = -1
    """Where the request's states go at the peer; -1 where the model keeps none."""

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
