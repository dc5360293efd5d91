"""KV pages of a GPU's pool for the transfer: chunk by chunk through pinned host memory, on a CUDA stream of their own.

    begin_read   pool ──gather──► device memory ──copy──► block of pinned memory ──► frames
    write, flush frames ──► block of pinned memory ──copy──► device memory ──scatter──► pool

Pieces are packed into blocks. Each block takes one copy, and a gather or scatter for each shape of pieces in it: whole
pages, and what is left at both ends of a chunk. Nothing waits for the device: an event says when a chunk is there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.engine.kv.device_copies import DeviceCopies, place
from headrace.engine.kv.pinned_blocks import PinnedLease, pinned_blocks
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import StridedPool, c_order
from headrace.transfer.protocol.layout import WHOLE, Box
from headrace.transfer.protocol.page_store import Completed, Handle, PageSlice, PageStore

BLOCK_BYTES = 16 << 20  # a copy of this size takes all of a link's bandwidth
CHUNKS = 2  # that pinned memory has room for
LEAST_PINNED_BYTES = 256 << 20
ALIGNMENT = 16  # bytes, of each run in a block

Bytes = NDArray[np.uint8]


class Run(NamedTuple):
    """Pieces of the same slots, layers and heads of several pages, one after the other in a block."""

    first: int
    """Index of the first one."""
    pieces: Sequence[PageSlice]
    block: int
    at: int
    """Where they begin in the block, in bytes."""
    shape: tuple[int, ...]
    """Of each piece in bytes: [layers, planes, kv_heads, slots, slot_bytes]."""

    @property
    def size(self) -> int:
        """Bytes of all its pieces."""
        return len(self.pieces) * prod(self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """These slots, layers and heads of all pages of a tensor of the pool."""
        _, first, slots, box = self.pieces[0]
        return tensor[:, box.layers, :, box.heads, first : first + slots]

    def within(self, block: Tensor, like: Tensor) -> Tensor:
        """The run's bytes in a block as [pieces, layers, planes, kv_heads, slots, head_dim], of the dtype of like."""
        *shape, slot_bytes = self.shape
        typed = block[self.at : self.at + self.size].view(like.dtype)
        return typed.view(len(self.pieces), *shape, slot_bytes // like.element_size())


class DeviceRead:
    """A PendingRead, and its pages."""

    rows = None

    def __init__(self, runs: Iterable[Run], lease: PinnedLease, event: "torch.cuda.Event", page_size: int) -> None:
        """event: recorded behind the copies."""
        self._lease = lease
        self._event = event
        self.page_size = page_size
        """Slots of a page."""
        self._at: dict[tuple[str, int], list[tuple[Run, int]]] = {}  # by tensor and page: where pieces of it are
        for run in runs:
            for index, piece in enumerate(run.pieces):
                self._at.setdefault((piece.box.tensor, piece.page), []).append((run, index))

    @property
    def done(self) -> bool:
        """See Handle."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def pages(self) -> "DeviceRead":
        """Itself."""
        return self

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """See ReadablePages; of the pieces that were asked for. Raises KeyError for another page, StopIteration for
        other slots."""
        run, index = next(
            (run, index)
            for run, index in self._at[box.tensor, page]
            if run.pieces[index].first_slot <= first_slot
            and first_slot + count <= run.pieces[index].first_slot + run.pieces[index].slots
        )
        size, skipped = prod(run.shape), first_slot - run.pieces[index].first_slot
        piece = self._lease.array(run.block, run.at + index * size, size).reshape(run.shape)
        return piece[:, :, :, skipped : skipped + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """See ReadablePages. What was asked for as one piece is in place."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))


class DeviceWrite(NamedTuple):
    """Handle of a chunk that is copied into a pool."""

    event: "torch.cuda.Event"
    """Recorded behind the last scatter."""
    lost: str = ""
    """See RemoteWrite: what a device has begun it completes, or the process fails."""

    @property
    def done(self) -> bool:
        """See Handle."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


def pinned_bytes(geometry: Geometry, chunk_tokens: int) -> int:
    """Pinned host memory for handoffs in chunks of so many tokens."""
    chunk = (chunk_tokens + geometry.page_size) * geometry.token_bytes + geometry.state_bytes
    return max(CHUNKS * chunk, LEAST_PINNED_BYTES)


def device_memory(pool: KVPool) -> DeviceMemory:
    """Where the pool of a GPU lies."""
    return DeviceMemory(pool.memory.data_ptr(), pool.memory.nbytes, pool.memory.device.index or 0)


class DevicePages(PageStore):
    """A SourceStore: the pool of a GPU. Used by one thread.

    Pages are read when the plans that write them are known to be done (outbox.py), and written while no plan uses them
    that is not done.
    """

    on_device = True

    def __init__(self, pool: KVPool, pinned_bytes: int) -> None:
        """pinned_bytes: host memory that copies go through."""
        self._pool = pool
        self._device = pool.tensor.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copies = DeviceCopies(self._device)
        largest = max(tensor[0].nbytes for tensor in pool.tensors.values())
        self._blocks = pinned_blocks(pinned_bytes, largest, BLOCK_BYTES)
        self._in_place: StridedPool | None = None
        self._batch: list[tuple[PageSlice, Bytes]] = []  # to be written by flush()
        self._writes: deque[tuple[DeviceWrite, PinnedLease]] = deque()  # under way, in their order

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """A copy, for which the host waits. Raises what KVPool.check() raises."""
        self._pool.check(page, first_slot, count, box.tensor)
        part = self._pool.tensors[box.tensor][page, box.layers, :, box.heads, first_slot : first_slot + count]
        copied: Bytes = self._copies.to_host(part).view(torch.uint8).numpy()
        return copied

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """As view()."""
        return self.view(page, first_slot, count, box)

    def in_place(self) -> StridedPool:
        """See SourceStore."""
        if self._in_place is None:
            layout = c_order(self._pool.geometry, self._pool.pages)
            self._in_place = StridedPool(self._pool.geometry, layout, device_memory(self._pool).array())
        return self._in_place

    def begin_read(self, pieces: Iterable[PageSlice], held: int = 0) -> DeviceRead | None:
        """See SourceStore. Raises what KVPool.check() raises."""
        wanted = self._checked(pieces)
        runs = list(self._packed(wanted))
        lease = self._blocks.lease(runs[-1].block + 1 if runs else 0, held)
        if lease is None:
            return None
        with torch.cuda.stream(self._stream):
            pages = self._page_numbers(wanted)
            for block, inside in _by_block(runs):
                gathered = torch.empty(_end(inside), dtype=torch.uint8, device=self._device)
                for run in inside:
                    tensor = self._pool.tensors[run.pieces[0].box.tensor]
                    index = pages[run.first : run.first + len(run.pieces)]
                    torch.index_select(run.of(tensor), 0, index, out=run.within(gathered, tensor))
                lease.blocks[block][: len(gathered)].copy_(gathered, non_blocking=True)
        return DeviceRead(runs, lease, self._recorded(), self._pool.page_size)

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Copied by flush(), until when data must not change. Raises what KVPool.check() raises."""
        self._pool.check(page, first_slot, count, box.tensor)
        self._batch.append((PageSlice(page, first_slot, count, box), data))

    def flush(self) -> Handle:
        """See PageStore. data may change from now on."""
        batch, self._batch = self._batch, []
        if not batch:
            return Completed()
        pieces = [piece for piece, _ in batch]
        with torch.cuda.stream(self._stream):
            pages = self._page_numbers(pieces)
            for _, inside in _by_block(self._packed(pieces)):
                self._write(inside, [data for _, data in batch], pages)
        return self._writes[-1][0]

    def _write(self, runs: Sequence[Run], data: Sequence[Bytes], pages: Tensor) -> None:
        """Write the runs of one block. data: of all pieces. pages: their page numbers on the device."""
        lease = self._block_to_write()
        for run in runs:
            target = lease.array(0, run.at, run.size).reshape(len(run.pieces), *run.shape)
            for row, source in zip(target, data[run.first : run.first + len(run.pieces)], strict=True):
                np.copyto(row, source)
        arrived = lease.blocks[0][: _end(runs)].to(self._device, non_blocking=True)
        for run in runs:
            tensor = self._pool.tensors[run.pieces[0].box.tensor]
            index = pages[run.first : run.first + len(run.pieces)]
            run.of(tensor).index_copy_(0, index, run.within(arrived, tensor))
        self._writes.append((DeviceWrite(self._recorded()), lease))

    def _checked(self, pieces: Iterable[PageSlice]) -> list[PageSlice]:
        wanted = list(pieces)
        for page, first_slot, count, box in wanted:
            self._pool.check(page, first_slot, count, box.tensor)
        return wanted

    def _packed(self, pieces: Sequence[PageSlice]) -> Iterator[Run]:
        """Runs of pieces, packed into blocks one after the other."""
        block = at = first = 0
        for _, alike in groupby(pieces, lambda piece: piece[1:]):
            left = list(alike)
            shape = _piece_shape(self._pool.tensors[left[0].box.tensor], left[0])
            size = prod(shape)
            while left:
                fitting = (self._blocks.block_bytes - at) // size
                if fitting <= 0:
                    block, at = block + 1, 0
                    continue
                taken, left = left[:fitting], left[fitting:]
                yield Run(first, taken, block, at, shape)
                first += len(taken)
                at += ceil_div(len(taken) * size, ALIGNMENT) * ALIGNMENT

    def _page_numbers(self, pieces: Sequence[PageSlice]) -> Tensor:
        return place(np.array([piece.page for piece in pieces], np.int64), self._device)

    def _block_to_write(self) -> PinnedLease:
        """A block; waits for the writes before it when all are in use."""
        while self._writes and self._writes[0][0].done:
            self._writes.popleft()
        while (lease := self._blocks.lease(1)) is None and self._writes:
            self._writes.popleft()[0].event.synchronize()
        return lease or self._blocks.beyond(1)  # where reads hold all others

    def _recorded(self) -> "torch.cuda.Event":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _piece_shape(tensor: Tensor, piece: PageSlice) -> tuple[int, ...]:
    """Shape of a piece in bytes: [layers, planes, kv_heads, slots, slot_bytes]."""
    one = tensor[0, piece.box.layers, :, piece.box.heads, piece.first_slot : piece.first_slot + piece.slots]
    return (*one.shape[:-1], one.shape[-1] * one.element_size())


def _by_block(runs: Iterable[Run]) -> Iterator[tuple[int, list[Run]]]:
    for block, inside in groupby(runs, lambda run: run.block):
        yield block, list(inside)


def _end(runs: Sequence[Run]) -> int:
    """Bytes of a block up to the end of its last run."""
    return runs[-1].at + runs[-1].size
