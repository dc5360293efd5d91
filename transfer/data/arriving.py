"""Chunks that are on their way into the pool of a decode stage, and reports that wait until they are there. Pure.

accepted ──► write begun ──► done ──► acknowledged
                 │
                 └─ meanwhile: no report that its request or session is over, and the same chunk is not written again
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.messages.stage_events import ReceiveCancelled, ReceiveFailed, SessionClosed, StageEvent
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.protocol.messages import Chunk
from headrace.transfer.protocol.page_store import Handle

FULL_BYTES = 128 << 20  # under way, from which on no more chunks are taken in


@dataclass(slots=True, eq=False)
class ArrivingChunk:
    """A chunk whose write was begun."""

    session: str
    stage: int
    """Rank of the prefill stage that it comes from."""
    request: int
    """Serial of its request."""
    header: Chunk
    frames: list[int]
    """Sizes of its frames."""
    first: FirstToken | None
    """From the metadata row of the last chunk."""
    write: Handle


class ArrivingChunks:
    """Chunks under way of one receiver, in the order in which their writes were begun."""

    def __init__(self) -> None:
        self._chunks: list[ArrivingChunk] = []
        self._held: list[StageEvent] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    @property
    def full(self) -> bool:
        """Whether no more chunks are to be taken in."""
        return sum(chunk.header.payload_bytes for chunk in self._chunks) >= FULL_BYTES

    def add(self, chunk: ArrivingChunk) -> None:
        """Note a chunk whose write has begun."""
        self._chunks.append(chunk)

    def has(self, session: str, stage: int, header: Chunk) -> bool:
        """Whether this chunk is being written."""
        key = header.ticket, header.generation, header.chunk
        return any(
            (chunk.session, chunk.stage) == (session, stage)
            and (chunk.header.ticket, chunk.header.generation, chunk.header.chunk) == key
            for chunk in self._chunks
        )

    def take(self) -> list[ArrivingChunk]:
        """Take out those whose writes are done."""
        done = [chunk for chunk in self._chunks if chunk.write.done]
        self._chunks = [chunk for chunk in self._chunks if chunk not in done]
        return done

    def reportable(self, events: Iterable[StageEvent]) -> list[StageEvent]:
        """These events and those that were held back, without what must wait for a write: the scheduler uses the pages
        of a request again once it is told that the request or its session is over."""
        waiting = [*self._held, *events]
        self._held = [event for event in waiting if self._concern(event)]
        return [event for event in waiting if not any(event is held for held in self._held)]

    def _concern(self, event: StageEvent) -> bool:
        match event:
            case ReceiveCancelled() | ReceiveFailed():
                return any(chunk.request == event.request for chunk in self._chunks)
            case SessionClosed():
                return any(chunk.session == event.session for chunk in self._chunks)
            case _:
                return False
