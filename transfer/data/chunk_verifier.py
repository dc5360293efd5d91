"""Checks checksum, metadata row and draft frame of a received chunk, before anything of it is written into the pool."""

from collections.abc import Sequence
from itertools import chain

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import PrepareReceive
from headrace.core.stats import Counters
from headrace.core.types.errors import CHECKSUM
from headrace.core.types.kv.backends import CUDA_IPC, FAKE, NIXL, SHM, ZMQ
from headrace.core.types.requests.request import PREFIX, FirstToken
from headrace.transfer.data import payload
from headrace.transfer.data.inbound import AcceptChunk, RejectChunk
from headrace.transfer.protocol import checksum, draft_frame, messages, metadata
from headrace.transfer.protocol.messages import Chunk
from headrace.transfer.protocol.page_store import PageStore


class ChunkVerifier:
    """Verifies the chunks of one receiver.

    Args:
        config: says which chunks must have a checksum.
        store: the pool, where payload lies that the prefill stage has written.
        counters: for checksum failures.
    """

    def __init__(self, config: TransferConfig, store: PageStore, counters: Counters) -> None:
        self._config = config
        self._store = store
        self._counters = counters

    def verify(
        self, backend: str, accept: AcceptChunk, header: Chunk, frames: Sequence[memoryview]
    ) -> AcceptChunk | RejectChunk:
        """Returns what it was given, or why the chunk is rejected. frames: those after the header."""
        if header.written and backend == ZMQ:
            text = "no peer may write into this pool, and no frames came"
            return RejectChunk(messages.BAD_CHUNK, text, accept.inbound)
        if header.checksum is None and self._insists(backend, header):
            return RejectChunk(CHECKSUM, "no checksum, and this server insists on one", accept.inbound)
        if header.checksum is not None:
            pages = payload.page_list(header.pages, header.slot)
            written = payload.in_place(self._store, accept.copies, pages) if header.written else ()
            found = checksum.of_frames(chain(frames, written))
            if found != header.checksum:
                self._counters.add("checksum_failures_total")
                text = f"checksum {found:016x}, the header says {header.checksum:016x}"
                return RejectChunk(CHECKSUM, text, accept.inbound)
        try:
            if header.total:
                first = metadata.first_token(frames[0], header.ticket, header.generation)
                _check_prefix(first, accept.inbound.order)
            if header.draft_bytes:
                _check_draft(header, frames[1], accept.inbound.order)
        except ValueError as error:
            return RejectChunk(messages.BAD_METADATA, str(error), accept.inbound)
        return accept

    def unchecked(self, backend: str) -> bool:
        """Whether KV comes in place to where nothing can read it for a checksum."""
        return backend in (CUDA_IPC, NIXL) and self._store.on_device

    def _insists(self, backend: str, header: Chunk) -> bool:
        """Whether a chunk must have a checksum."""
        if backend == FAKE or self.unchecked(backend):
            return False
        return self._config.checksum_shm if header.written and backend == SHM else self._config.checksum


def _check_prefix(first: FirstToken, order: PrepareReceive) -> None:
    """Raises ValueError for a row without a first token where a prompt was asked for, and for one with it where what a
    prefix cache has was."""
    if (first.finish_reason == PREFIX) != order.prefix:
        there, asked = ("a", "what a prefix cache has") if order.prefix else ("no", "a prompt")
        raise ValueError(f"metadata row has {there} first token, and {asked} was asked for")


def _check_draft(header: Chunk, frame: memoryview, order: PrepareReceive) -> None:
    """Raises ValueError for a draft frame that is not one of this ticket and generation, or not of what was asked
    for."""
    draft = draft_frame.decode(frame, header.ticket, header.generation)
    last = order.start + order.count - 1
    if draft.hidden is not None and (draft.hidden.start != last or not order.draft.hidden):
        position = draft.hidden.start
        raise ValueError(f"a hidden state of position {position} that was not asked for; the prompt ends at {last}")
    if draft.tokens is not None and len(draft.tokens.ids) > order.draft.top_k:
        raise ValueError(f"{len(draft.tokens.ids)} draft tokens, and {order.draft.top_k} were asked for")
