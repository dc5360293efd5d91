"""Writes from a GPU's pool into one in the memory of the same or another GPU of the host, which another process owns:
the sending side of transfer/backends/cuda_ipc.py.

    write … flush    our pool ──gather──► our memory ──scatter──► peer's pool, on a CUDA stream of their own; an event

Pieces of the same slots, layers and heads take one gather and one scatter together, for each BLOCK_BYTES. Nothing waits
for the device. Pages are read when the plans that write them are known to be done (outbox.py), and the peer's are
written while they are reserved for us, so that no plan of the peer uses them.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.kv.backends import NixlAccess, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.device_pages import BLOCK_BYTES, DeviceWrite, device_memory
from headrace.engine.kv.foreign_memory import tensor_at
from headrace.engine.kv.pool import KVPool, strided_tensors
from headrace.transfer.backends.base import RemotePages, RemoteWrite
from headrace.transfer.backends.cuda_driver import CudaIpc
from headrace.transfer.backends.cuda_ipc import MappedPool
from headrace.transfer.backends.strided_pool import check_slots, page_numbers, placed
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed, SourcePages


class CopyQueue(Protocol):
    """Where copies are started, in their order."""

    def run(self, copies: Callable[[], None]) -> RemoteWrite:
        """Start copies. Returns their handle; the host does not wait for them."""
        ...


class StreamQueue:
    """A CUDA stream as a CopyQueue."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copies: Callable[[], None]) -> DeviceWrite:
        """See CopyQueue."""
        with torch.cuda.stream(self._stream):
            copies()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return DeviceWrite(event)


class PagePart(NamedTuple):
    """The same slots, layers and heads of any page of a tensor, on both sides."""

    tensor: str
    shape: tuple[int, ...]
    """In elements: [layers, planes, kv_heads, slots, head_dim]."""
    here: int
    """Where they begin in a page of our pool, in elements."""
    there: int
    """Where they begin in a page of the peer's."""

    def of(self, pool: Tensor, first: int) -> Tensor:
        """These of all pages of a pool's tensor, which begin there in each."""
        return pool.as_strided((len(pool), *self.shape), pool.stride(), pool.storage_offset() + first)


class PairedPages(NamedTuple):
    """Copies between the same pages' parts of two tensors, each [pages, ...]."""

    source: Tensor
    target: Tensor
    own: list[int]
    """Pages of the source."""
    pages: list[int]
    """Those of the target."""


class CudaIpcTransport:
    """Transport of a stage on a GPU to pools on GPUs of its host."""

    def __init__(self, pool: KVPool, ipc: CudaIpc, queue: CopyQueue | None = None) -> None:
        """pool: the stage's own. queue: None for a stream of its GPU."""
        self._pool, self._ipc = pool, ipc
        self._queue = queue or StreamQueue(pool.memory.device)

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "CudaIpcPages":
        """Map the peer's pool. Raises OSError or ValueError."""
        if memory.cuda_ipc is None:
            raise ValueError("the peer named no memory of a GPU")
        mapped = MappedPool(memory.cuda_ipc, session, stage, self._ipc, device_memory(self._pool).device)
        try:
            raw = tensor_at(mapped.address, memory.cuda_ipc.bytes, self._pool.memory.device)
            theirs = strided_tensors(raw, geometry, memory.cuda_ipc)
        except ValueError:
            mapped.close()
            raise
        tensors = {name: tensor for name, tensor in theirs.items() if name in self._pool.tensors}
        return CudaIpcPages(self._pool, mapped, tensors, memory.cuda_ipc.pages, self._queue)


class CudaIpcPages(RemotePages):
    """A peer's pool, mapped for a GPU of this process."""

    by_address = True
    unchecked = True

    def __init__(
        self, pool: KVPool, mapped: MappedPool, tensors: dict[str, Tensor], pages: int, queue: CopyQueue
    ) -> None:
        """tensors: of the peer's pool, by name."""
        self._pool, self._mapped, self._queue = pool, mapped, queue
        self._tensors = tensors
        self._pages = pages
        self._memory = device_memory(pool)
        self._places = {tensor.name: spot for tensor, spot in placed(pool.geometry, pool.layout)}
        self._batch: dict[PagePart, tuple[list[int], list[int]]] = {}  # pages here and there
        self._last: RemoteWrite = Completed()  # behind all that was started

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Queued for the next flush. data: an array of our pool's addresses, see DeviceMemory. Raises IndexError."""
        assert self._tensors, "closed"
        theirs, own = self._tensors[box.tensor], self._pool.tensors[box.tensor]
        check_slots(page, first_slot, count, len(theirs), theirs.shape[4])
        size, spot = own.element_size(), self._places[box.tensor]
        inside = data.__array_interface__["data"][0] - self._memory.address - spot.offset
        own_page, here = divmod(inside, spot.strides[0])
        _, layer, _, head, slot, _ = theirs.stride()
        there = (box.layers.start or 0) * layer + (box.heads.start or 0) * head + first_slot * slot
        shape = (*data.shape[:4], data.shape[4] // size)
        self._add(PagePart(box.tensor, shape, here // size, there), [own_page], [page])

    def write_pages(self, pages: Sequence[int], store: SourcePages, own: Sequence[int]) -> None:
        """Queued for the next flush. Raises IndexError."""
        ((name, theirs),) = self._tensors.items()  # pages are whole where there is one tensor
        page_numbers(pages, self._pages)
        page_numbers(own, self._pool.pages)
        self._add(PagePart(name, tuple(theirs.shape[1:]), 0, 0), own, pages)

    def flush(self) -> RemoteWrite:
        """Start the copies that are queued."""
        if not self._batch:
            return Completed()
        batch, self._batch = self._batch, {}
        copies = [self._copies(part, *pages) for part, pages in batch.items()]
        self._last = self._queue.run(lambda: _copy(copies))
        return self._last

    def close(self) -> "Closing":
        """Start nothing any more. The right to write is given up when the device has done the last copy."""
        self._batch.clear()
        self._tensors.clear()
        return Closing(self._last, self._mapped)

    def _copies(self, part: PagePart, own: list[int], pages: list[int]) -> PairedPages:
        ours, theirs = self._pool.tensors[part.tensor], self._tensors[part.tensor]
        return PairedPages(part.of(ours, part.here), part.of(theirs, part.there), own, pages)

    def _add(self, part: PagePart, own: Sequence[int], pages: Sequence[int]) -> None:
        here, there = self._batch.setdefault(part, ([], []))
        here += own
        there += pages


class Closing:
    """Handle of the end of access to a peer's pool."""

    def __init__(self, last: RemoteWrite, mapped: MappedPool) -> None:
        """last: the last copies into it."""
        self._last = last
        self._mapped: MappedPool | None = mapped

    @property
    def done(self) -> bool:
        """Lets go of the pool once its copies are done."""
        if self._mapped is not None and self._last.done:
            mapped, self._mapped = self._mapped, None
            mapped.close()
        return self._mapped is None


def _copy(batch: Sequence[PairedPages]) -> None:
    """Start copies on the current stream."""
    numbers = np.array([list(chain(*side)) for side in zip(*(each[2:] for each in batch), strict=True)], np.int64)
    here, there = place(numbers, batch[0].source.device)
    at = 0
    for source, target, own, _ in batch:
        most = max(1, BLOCK_BYTES // source[0].nbytes)
        for first in range(at, at + len(own), most):
            some = slice(first, min(first + most, at + len(own)))
            target.index_copy_(0, there[some], source.index_select(0, here[some]))
        at += len(own)
