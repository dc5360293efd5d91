"""Pages of KV tiers: what a tier has to do, and how pages of the pool are read and written, one by one or by chunk.

pool in host memory   where they lie
pool of a GPU         chunk by chunk, as they are handed to peers (engine/kv/device_pages.py): each is a gather or
                      scatter, a copy through pinned memory and an event; the next one is under way meanwhile
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.device_pages import ALIGNMENT, BLOCK_BYTES, DevicePages, DeviceRead
from headrace.engine.kv.pool import KVPool
from headrace.transfer.protocol.layout import Box
from headrace.transfer.protocol.page_store import PageSlice

Bytes = NDArray[np.uint8]  # one-dimensional and contiguous
Parts = Sequence[Bytes]  # a page in host memory: what belongs to each tensor, one behind the other in what is stored
Failure = Literal["missing", "checksum", "full", "io"]
FAILURES: tuple[Failure, ...] = ("missing", "checksum", "full", "io")

AHEAD = 2  # chunks that are read of a GPU at a time: one is copied while the one before it is stored
PINNED_CHUNKS = 4  # for them, what was read before, and what is loaded; of their own: no handoff waits for them


class TierError(Exception):
    """A page could not be stored or loaded. The tier goes on working."""

    def __init__(self, reason: Failure, message: str) -> None:
        """reason: missing: the slot holds nothing; checksum: what it holds was changed; full: no space is left; io: the
        system refused."""
        super().__init__(message)
        self.reason = reason


class TierStore(Protocol):
    """Slots that hold one page each. Slots are numbered from 0 by the scheduler."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        ...

    def put(self, slot: int, page: Parts, header: PageHeader | None) -> int:
        """Store a page; what the slot held is gone. header: needed by the disk tier. Returns the bytes written.

        Raises TierError, after which the slot holds nothing.
        """
        ...

    def get(self, slot: int) -> Bytes:
        """A slot's page, verified; it stays until the next call of get(), or until the slot is stored to or dropped.
        Raises TierError."""
        ...

    def expect(self, slots: Sequence[int]) -> None:
        """These slots are what get() is called for next, in this order."""
        ...

    def drop(self, slot: int) -> None:
        """Forget what the slot holds, if anything."""
        ...

    def take_lost(self) -> Sequence[int]:
        """Slots that the store had to empty to make room, since the last call."""
        ...

    def close(self) -> None:
        """Free memory and close files."""
        ...


def check_slot(slot: int, slots: int) -> None:
    """Raises IndexError for a slot outside the tier."""
    if not 0 <= slot < slots:
        raise IndexError(f"slot {slot} is outside the tier of {slots}")


class PoolPages(Protocol):
    """Pages of a pool, for one thread. No plan writes those that are read, or uses those that are written."""

    page_bytes: int
    """Bytes of one page."""

    def read(self, pages: Iterable[int]) -> Iterator[Parts]:
        """These pages in their order, each until the next one is asked for. Raises IndexError for a page outside the
        pool."""
        ...

    def write(self, page: int, data: Bytes) -> None:
        """Overwrite a page from host memory, which may change from now on; it is in the pool after flush(). Raises
        IndexError for a page outside the pool."""
        ...

    def flush(self) -> None:
        """Wait until the pool holds what was written."""
        ...


class HostPoolPages(PoolPages):
    """Pages of a pool in host memory, in place."""

    def __init__(self, pool: KVPool) -> None:
        """pool: of the thread's stage."""
        self._pages = pool.pages
        self._rows: list[NDArray[np.uint8]] = [
            pool.tensors[name].view(pool.pages, -1).view(torch.uint8).numpy() for name in _paged(pool)
        ]
        self.page_bytes = sum(rows.shape[1] for rows in self._rows)

    def read(self, pages: Iterable[int]) -> Iterator[Parts]:
        """See PoolPages."""
        return map(self._parts, pages)

    def write(self, page: int, data: Bytes) -> None:
        """See PoolPages. Other threads run meanwhile: numpy releases the interpreter's lock."""
        at = 0
        for part in self._parts(page):
            np.copyto(part, data[at : at + len(part)])
            at += len(part)

    def flush(self) -> None:
        """Nothing is under way."""

    def _parts(self, page: int) -> Parts:
        if not 0 <= page < self._pages:
            raise IndexError(f"page {page} is outside the pool of {self._pages}")
        return [rows[page] for rows in self._rows]


class DevicePoolPages(PoolPages):
    """Pages of a GPU's pool, chunk by chunk."""

    def __init__(self, pool: KVPool) -> None:
        """pool: of the thread's stage. Raises ConfigError when the system refuses the pinned memory."""
        self._boxes = [Box(slice(None), slice(None), name) for name in _paged(pool)]
        tensors = [pool.tensors[box.tensor] for box in self._boxes]
        self._shapes = [(*tensor.shape[1:-1], tensor.shape[-1] * tensor.element_size()) for tensor in tensors]
        self.page_bytes = sum(map(prod, self._shapes))
        self._chunk = max(1, (BLOCK_BYTES - (len(tensors) - 1) * ALIGNMENT) // self.page_bytes)  # pages
        one_block = self._chunk * self.page_bytes <= BLOCK_BYTES  # else one for each tensor, at most
        block_bytes = max(BLOCK_BYTES, *map(prod, self._shapes))
        self._pages = DevicePages(pool, PINNED_CHUNKS * block_bytes * (1 if one_block else len(tensors)))

    def read(self, pages: Iterable[int]) -> Iterator[Parts]:
        """See PoolPages."""
        left = iter(pages)
        under_way: deque[tuple[list[int], DeviceRead]] = deque()
        try:
            while chunk := list(islice(left, self._chunk)):
                while (read := self._pages.begin_read(self._pieces(chunk))) is None:
                    yield from self._copied(*under_way.popleft())
                under_way.append((chunk, read))
                if len(under_way) == AHEAD:
                    yield from self._copied(*under_way.popleft())
            while under_way:
                yield from self._copied(*under_way.popleft())
        finally:  # of an order that is given up
            for _, read in under_way:
                read.wait()

    def write(self, page: int, data: Bytes) -> None:
        """See PoolPages."""
        at = 0
        for piece, shape in zip(self._pieces([page]), self._shapes, strict=True):
            end = at + prod(shape)
            self._pages.write(*piece[:3], data[at:end].reshape(shape), piece.box)
            at = end

    def flush(self) -> None:
        """See PoolPages."""
        self._pages.flush().wait()

    def _pieces(self, pages: Sequence[int]) -> Iterator[PageSlice]:
        for box, shape in zip(self._boxes, self._shapes, strict=True):
            for page in pages:
                yield PageSlice(page, 0, shape[3], box)

    def _copied(self, pages: Sequence[int], read: DeviceRead) -> Iterator[Parts]:
        """The pages of a chunk, once they are in host memory."""
        read.wait()
        for page in pages:
            yield [read.read(*piece[:3], piece.box).reshape(-1) for piece in self._pieces([page])]


def pool_pages(pool: KVPool) -> PoolPages:
    """The pages of a stage's pool, for its copy thread. Raises ConfigError when the system refuses memory."""
    return DevicePoolPages(pool) if pool.tensor.device.type == "cuda" else HostPoolPages(pool)


def _paged(pool: KVPool) -> list[str]:
    """Tensors that have pages; states have slots of their own."""
    return [each.name for each in pool.geometry.tensors if not each.per_request]
