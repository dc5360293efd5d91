"""Receive table of a decode stage: which requests expect KV, and which chunks may be written. Pure.

PrepareReceive ──► expected ──all chunks of all source stages, metadata──► arrived
                     │ bad chunk: failed      │ CancelReceive: closed
                     ▼                        ▼
          nothing is written for it any more; every later chunk is answered, none is written
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.messages.orders import PrepareReceive
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES, packed_length
from headrace.core.types.requests.draft import NO_DRAFT
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.protocol import draft_frame, messages, metadata
from headrace.transfer.protocol.layout import Copy, carried, copies, pages_for
from headrace.transfer.protocol.messages import Chunk

Key = tuple[str, str, int]  # session, ticket, generation
ARRIVED_KEPT = 4096  # tickets remembered after they arrived, so that chunks sent again are acknowledged again


@dataclass(slots=True)
class Source:
    """One prefill stage's part of a ticket."""

    geometry: Geometry
    """That stage's geometry, cut to the layers and heads that come here."""
    replica: int = 0
    """Data-parallel replica of the prefill server that the stage belongs to."""
    until: int = 0
    """Positions before this one are written, without a gap."""
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Chunks written so far: number to (start, count) in tokens."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Where chunks end that were written behind a gap, by where they begin."""
    total: int = 0
    """Number of chunks, known with the last one; 0 before."""

    @property
    def complete(self) -> bool:
        """Every chunk of this stage is written."""
        return self.total > 0 and len(self.chunks) == self.total

    def write(self, header: Chunk) -> None:
        """Note that a chunk is written."""
        self.chunks[header.chunk] = (header.start, header.count)
        self.total = header.total or self.total
        self.ahead[header.start] = header.start + header.count
        while (end := self.ahead.pop(self.until, self.until)) > self.until:
            self.until = end


@dataclass(slots=True)
class Inbound:
    """A request that expects KV."""

    order: PrepareReceive
    """What was reserved for it."""
    sources: dict[int, Source]
    """By rank of the prefill stage."""
    replica: int | None = None
    """The replica of the prefill server that the first chunk came from: all others come from there, too."""
    first: FirstToken | None = None
    """From the metadata row, which comes with the last chunk."""
    bytes: int = 0
    """Payload written so far, over all sources."""
    chunks: int = 0
    """Number of chunks written so far, over all sources."""

    @property
    def key(self) -> Key:
        """Session, ticket and generation."""
        return self.order.session, self.order.ticket, self.order.generation

    @property
    def complete(self) -> bool:
        """Every chunk of every stage of the ticket's replica is written."""
        return self.replica is not None and all(source.complete for source in self._senders)

    @property
    def until(self) -> int:
        """Positions before this one have come from every stage of the ticket's replica, without a gap."""
        return min((source.until for source in self._senders), default=self.order.start)

    @property
    def _senders(self) -> Iterator[Source]:
        return (source for source in self.sources.values() if source.replica == self.replica)


class AcceptChunk(NamedTuple):
    """The chunk may be written if its checksum is right."""

    inbound: Inbound
    source: Source
    """The stage that it comes from."""
    copies: list[Copy]
    """Where its frames go in the pool."""


class RepeatChunk(NamedTuple):
    """The chunk is written already: acknowledge it again."""


class RejectChunk(NamedTuple):
    """The chunk must not be written: refuse it."""

    code: str
    """Of the Nack."""
    message: str
    inbound: Inbound | None = None
    """The request that fails because of it; None if there is none."""


class InboundTable:
    """The requests for which one decode stage expects KV.

    Args:
        geometry: of the stage's pool.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._requests: dict[int, Inbound] = {}
        self._by_key: dict[Key, Inbound] = {}
        self._arrived: dict[Key, None] = {}  # complete ones, the oldest first

    def __len__(self) -> int:
        return len(self._requests)

    def prepare(
        self, order: PrepareReceive, sources: Mapping[int, Geometry], replicas: Mapping[int, int] | None = None
    ) -> str:
        """Start expecting KV from these prefill stages. Those of each replica together have all layers and heads, each
        once; the first chunk says which replica the ticket comes from.

        replicas: of the stages; None: there is one. Returns what is wrong with the order, "" if nothing.
        """
        key = order.session, order.ticket, order.generation
        needed = pages_for(self._geometry.page_size, order.start, order.count)
        replicas = replicas or dict.fromkeys(sources, 0)
        own = self._geometry
        for replica in set(replicas.values()) or {0}:
            found = [source for stage, source in sources.items() if replicas[stage] == replica]
            for what, size, wanted in (
                ("a token", sum(each.token_bytes for each in found), own.token_bytes),
                ("the states of a request", sum(each.state_bytes for each in found), own.state_bytes),
            ):
                if size != wanted:
                    return f"the stages of the prefill server have {size} of this stage's {wanted} bytes of {what}"
        if own.state_bytes and order.slot < 0:
            return f"no slot given for states of {own.state_bytes} bytes"
        if packed_length(order.pages) != needed:
            return f"{packed_length(order.pages)} pages given, {needed} needed"
        if key in self._by_key or order.request in self._requests:
            return "this ticket and generation is expected already"
        parts = {stage: Source(part, replicas[stage], order.start) for stage, part in sources.items()}
        inbound = Inbound(order, parts)
        self._requests[order.request] = self._by_key[key] = inbound
        return ""

    def close(self, request: int) -> Inbound | None:
        """Stop expecting KV for a request. Returns it if it was open."""
        inbound = self._requests.pop(request, None)
        if inbound is not None:
            del self._by_key[inbound.key]
        return inbound

    def check(
        self, session: str, stage: int, header: Chunk, frames: list[int]
    ) -> AcceptChunk | RepeatChunk | RejectChunk:
        """Decide about a chunk of a prefill stage. frames: sizes of the frames after the header."""
        key = session, header.ticket, header.generation
        inbound = self._by_key.get(key)
        if inbound is None:
            if key in self._arrived:
                return RepeatChunk()
            return RejectChunk(messages.UNKNOWN_TICKET, "this ticket and generation is not expected here")
        source = inbound.sources.get(stage)
        if source is None:
            return RejectChunk(messages.BAD_CHUNK, f"stage {stage} has no part in this ticket", inbound)
        if inbound.replica not in (None, source.replica):
            text = f"stage {stage} is of replica {source.replica}, and the ticket comes from replica {inbound.replica}"
            return RejectChunk(messages.BAD_CHUNK, text, inbound)
        if header.chunk in source.chunks:
            return RepeatChunk()
        problem = self._problem(inbound.order, source, header)
        if problem:
            return RejectChunk(messages.BAD_CHUNK, problem, inbound)
        plan = copies(source.geometry, self._geometry, header.start, header.count, bool(header.total))
        problem = _size_problem(header, plan, frames)
        return RejectChunk(messages.BAD_CHUNK, problem, inbound) if problem else AcceptChunk(inbound, source, plan)

    def written(self, accepted: AcceptChunk, header: Chunk, first: FirstToken | None) -> str:
        """Note a chunk that was written. Returns what is wrong if the chunks do not fit together, or ""."""
        inbound, source, _ = accepted
        inbound.replica = source.replica
        source.write(header)
        inbound.first = first or inbound.first
        inbound.bytes += header.payload_bytes
        inbound.chunks += 1
        return _gap(inbound.order, source) if source.complete else ""

    def arrive(self, inbound: Inbound) -> None:
        """Close a complete request; its chunks are acknowledged if they come again."""
        self.close(inbound.order.request)
        self._arrived[inbound.key] = None
        if len(self._arrived) > ARRIVED_KEPT:
            del self._arrived[next(iter(self._arrived))]

    def _problem(self, expect: PrepareReceive, source: Source, header: Chunk) -> str:
        """How a chunk's header does not fit what was reserved; "" when it does."""
        start, count = header.start, header.count
        if start < expect.start or start + count > expect.start + expect.count:
            return f"tokens {start} to {start + count}; expected {expect.start} to {expect.start + expect.count}"
        if count and start < source.until:
            return f"tokens from {start}; those before {source.until} have come"
        if header.total not in (0, header.chunk + 1) or (
            source.total and (header.total or header.chunk > source.total)
        ):
            return f"chunk {header.chunk} of {header.total}, after a last chunk of {source.total}"
        if not count and not header.total:
            return "an empty chunk that is not the last"
        if header.chunk > expect.count:
            return f"chunk number {header.chunk} of {expect.count} tokens"
        if header.draft_bytes and (not header.total or expect.draft == NO_DRAFT):
            return f"a draft frame of {header.draft_bytes} bytes that was not asked for, or not with the last chunk"
        if header.draft_bytes > draft_frame.MAX_BYTES:
            return f"a draft frame of {header.draft_bytes} bytes; at most {draft_frame.MAX_BYTES} may come"
        if header.row != expect.row:
            return f"metadata row {header.row}, reserved was {expect.row}"
        if header.slot != expect.slot:
            return f"slot {header.slot}, reserved was {expect.slot}"
        first = start // self._geometry.page_size - expect.start // self._geometry.page_size
        needed = pages_for(self._geometry.page_size, start, count)
        if header.pages != expect.pages[first * ITEM_BYTES : (first + needed) * ITEM_BYTES]:
            return f"pages other than those reserved for tokens {start} to {start + count}"
        return ""


def _size_problem(header: Chunk, plan: list[Copy], frames: list[int]) -> str:
    """How the frames of a chunk differ from those of its plan; "" when they do not."""
    payload = [frame.bytes for frame, _ in carried(plan)]
    expected = [metadata.ROW_BYTES] if header.total else []
    expected += [header.draft_bytes] if header.draft_bytes else []
    if header.payload_bytes != sum(payload):
        return f"a payload of {header.payload_bytes} bytes; expected {sum(payload)}"
    if not header.written:
        expected += payload
    if frames != expected:
        return f"{len(frames)} frames of {sum(frames)} bytes; expected {len(expected)} of {sum(expected)}"
    return ""


def _gap(expect: PrepareReceive, source: Source) -> str:
    """Where the written chunks fail to cover the expected tokens exactly once; "" when they do."""
    position = expect.start
    for start, count in sorted(source.chunks.values()):
        if start != position:
            return f"tokens from {position} were expected next, and a chunk begins at {start}"
        position += count
    end = expect.start + expect.count
    return "" if position == end else f"the last chunk ends at token {position}, expected {end}"
