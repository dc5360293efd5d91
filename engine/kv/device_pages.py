"""KV pages of a GPU's pool for the transfer and the tiers: chunk by chunk through pinned host memory, on a CUDA stream
of their own.

    begin_read   pool ──gather──► device memory ──copy──► block of pinned memory ──► frames, slots of a tier
    write, flush frames, slots of a tier ──► block of pinned memory ──copy──► device memory ──scatter──► pool

Pieces are packed into blocks. Each block takes one copy, and a gather or scatter for each shape of pieces in it: whole
pages, and what is left at both ends of a chunk. Nothing waits for the device: an event says when a chunk is there.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.engine.kv.device_copies import begin_copy, place
from headrace.engine.kv.pinned_blocks import PinnedLease, pinned_blocks
from headrace.engine.kv.pool import PagedTensors, check_piece
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import StridedPool
from headrace.transfer.protocol.layout import WHOLE, Box
from headrace.transfer.protocol.page_store import Completed, PageSlice, PageStore

BLOCK_BYTES = 16 << 20  # a copy of this size takes all of a link's bandwidth
CHUNKS = 2  # that pinned memory has room for
LEAST_PINNED_BYTES = 256 << 20
ALIGNMENT = 16  # bytes, of each run in a block

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Run:
    """Pieces of the same slots, layers and heads of several pages, at equal distances in a block."""

    pieces: list[PageSlice]
    block: int
    at: int
    """Where the first one begins in the block, in bytes."""
    shape: tuple[int, ...]
    """Of each piece in bytes: [layers, planes, kv_heads, slots, slot_bytes]."""
    step: int
    """Bytes from one piece to the next."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Where the last one ends in the block, in bytes."""
        return self.at + (len(self.pieces) - 1) * self.step + self.piece_bytes

    def place(self, index: int) -> slice:
        """Where a piece is in the block, in bytes."""
        start = self.at + index * self.step
        return slice(start, start + self.piece_bytes)

    def of(self, tensor: Tensor) -> Tensor:
        """These slots, layers and heads of all pages of a tensor of the pool."""
        _, first, slots, box = self.pieces[0]
        return tensor[:, box.layers, :, box.heads, first : first + slots]

    def within(self, block: Tensor, like: Tensor) -> Tensor:
        """The run's bytes in a block as [pieces, layers, planes, kv_heads, slots, head_dim], of the dtype of like."""
        size = like.element_size()
        shape = (*self.shape[:-1], self.shape[-1] // size)
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = block[self.at : self.end].view(like.dtype)
        return typed.as_strided((len(self.pieces), *shape), (self.step // size, *strides))


class Packing:
    """Places pieces in blocks, one after the other. Alike ones are a run if they follow each other, or take turns with
    those of other tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], block_bytes: int) -> None:
        """tensors: of the pool, by name."""
        self.runs: list[Run] = []
        self._tensors, self._block_bytes = tensors, block_bytes
        self._last: Run | None = None  # the one with the last piece

    def add(self, piece: PageSlice) -> Run:
        """The run whose last piece it is now."""
        self._last = self._longer(piece) or self._new(piece)
        return self._last

    def take(self, block: int) -> list[Run]:
        """Take out the runs of a block; those of the blocks before it have been taken."""
        taken = [run for run in self.runs if run.block == block]
        self.runs = self.runs[len(taken) :]
        return taken

    def _longer(self, piece: PageSlice) -> Run | None:
        """A run that it continues."""
        for run in self.runs[-len(self._tensors) :]:
            at = run.end if run is self._last else self._next()
            step = at - run.at if len(run.pieces) == 1 else run.step
            there = run.at + len(run.pieces) * step
            here = self._last is not None and run.block == self._last.block and run.pieces[0][1:] == piece[1:]
            if here and at == there and at + run.piece_bytes <= self._block_bytes:
                run.pieces.append(piece)
                run.step = step
                return run
        return None

    def _new(self, piece: PageSlice) -> Run:
        shape = _piece_shape(self._tensors[piece.box.tensor], piece)
        block, at = self._last.block if self._last else 0, self._next()
        if at + prod(shape) > self._block_bytes:
            block, at = block + 1, 0
        self.runs.append(Run([piece], block, at, shape, prod(shape)))
        return self.runs[-1]

    def _next(self) -> int:
        """Where the next piece begins in the last one's block, unless it is alike."""
        return ceil_div(self._last.end, ALIGNMENT) * ALIGNMENT if self._last else 0


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

    def wait(self) -> None:
        """Wait until it is done; other threads run meanwhile."""
        self._event.synchronize()

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
        place, skipped = run.place(index), first_slot - run.pieces[index].first_slot
        piece = self._lease.array(run.block, place.start, run.piece_bytes).reshape(run.shape)
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

    def wait(self) -> None:
        """Wait until it is done; other threads run meanwhile."""
        self.event.synchronize()


def pinned_bytes(geometry: Geometry, chunk_tokens: int) -> int:
    """Pinned host memory for handoffs in chunks of so many tokens."""
    chunk = (chunk_tokens + geometry.page_size) * geometry.token_bytes + geometry.state_bytes
    return max(CHUNKS * chunk, LEAST_PINNED_BYTES)


def device_memory(pool: PagedTensors) -> DeviceMemory:
    """Where the pool of a GPU lies."""
    return DeviceMemory(pool.memory.data_ptr(), pool.memory.nbytes, pool.memory.device.index or 0)


class DevicePages(PageStore):
    """A SourceStore: the pool of a GPU. Used by one thread.

    Pages are read when the plans that write them are known to be done (outbox.py), and written while no plan uses them
    that is not done.
    """

    on_device = True

    def __init__(self, pool: PagedTensors, pinned_bytes: int) -> None:
        """pinned_bytes: host memory that copies go through."""
        self._pool = pool
        self._device = pool.memory.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        largest = max(tensor[0].nbytes for tensor in pool.tensors.values())
        self._blocks = pinned_blocks(pinned_bytes, largest, BLOCK_BYTES)
        self._in_place: StridedPool | None = None
        self._packing = Packing(pool.tensors, self._blocks.block_bytes)  # of what is written
        self._filling: _Filling | None = None  # the block that write() fills
        self._writes: deque[tuple[DeviceWrite, PinnedLease]] = deque()  # under way, in their order

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """A copy, for which the host waits. Raises what check_piece() raises."""
        check_piece(self._pool.tensors, page, first_slot, count, box)
        part = self._pool.tensors[box.tensor][page, box.layers, :, box.heads, first_slot : first_slot + count]
        with torch.cuda.stream(self._stream):
            host = begin_copy(part.contiguous())
        self._stream.synchronize()
        copied: Bytes = host.view(torch.uint8).numpy()
        return copied

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """As view()."""
        return self.view(page, first_slot, count, box)

    def in_place(self) -> StridedPool:
        """See SourceStore."""
        if self._in_place is None:
            memory = device_memory(self._pool).array()
            self._in_place = StridedPool(self._pool.geometry, self._pool.layout, memory)
        return self._in_place

    def begin_read(self, pieces: Iterable[PageSlice], held: int = 0) -> DeviceRead | None:
        """See SourceStore. Raises what check_piece() raises."""
        packing = Packing(self._pool.tensors, self._blocks.block_bytes)
        for piece in pieces:
            check_piece(self._pool.tensors, *piece)
            packing.add(piece)
        runs = packing.runs
        self._forget_written()
        lease = self._blocks.lease(runs[-1].block + 1 if runs else 0, held)
        if lease is None:
            return None
        with torch.cuda.stream(self._stream):
            numbers = iter(self._page_numbers(runs))
            for block, inside in groupby(runs, lambda run: run.block):
                some = list(inside)
                gathered = torch.empty(max(run.end for run in some), dtype=torch.uint8, device=self._device)
                for run, pages in zip(some, numbers, strict=False):
                    tensor = self._pool.tensors[run.pieces[0].box.tensor]
                    torch.index_select(run.of(tensor), 0, pages, out=run.within(gathered, tensor))
                lease.blocks[block][: len(gathered)].copy_(gathered, non_blocking=True)
        return DeviceRead(runs, lease, self._recorded(), self._pool.geometry.page_size)

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """See PageStore. A block that is full is on its way at once, the last one with flush(). Raises what
        check_piece() raises."""
        check_piece(self._pool.tensors, page, first_slot, count, box)
        run = self._packing.add(PageSlice(page, first_slot, count, box))
        if self._filling is None or self._filling.number != run.block:
            self._send()
            lease = self._block_to_write()
            self._filling = _Filling(run.block, lease, lease.array(0, 0, self._blocks.block_bytes))
        np.copyto(self._filling.block[run.place(len(run.pieces) - 1)].reshape(run.shape), data)

    def flush(self) -> DeviceWrite | Completed:
        """See PageStore."""
        if self._filling is None:
            return Completed()
        self._send()
        return self._writes[-1][0]

    def _send(self) -> None:
        """Start the copy of the block that is filled, and its scatters."""
        filled, self._filling = self._filling, None
        if filled is None:
            return
        runs = self._packing.take(filled.number)
        with torch.cuda.stream(self._stream):
            numbers = self._page_numbers(runs)
            arrived = filled.lease.blocks[0][: max(run.end for run in runs)].to(self._device, non_blocking=True)
            for run, pages in zip(runs, numbers, strict=True):
                tensor = self._pool.tensors[run.pieces[0].box.tensor]
                run.of(tensor).index_copy_(0, pages, run.within(arrived, tensor))
        self._writes.append((DeviceWrite(self._recorded()), filled.lease))

    def _page_numbers(self, runs: Sequence[Run]) -> Sequence[Tensor]:
        """The pages of each run, on the device."""
        numbers = place(np.array([piece.page for run in runs for piece in run.pieces], np.int64), self._device)
        return torch.split(numbers, [len(run.pieces) for run in runs])

    def _block_to_write(self) -> PinnedLease:
        """A block; waits for the writes before it when all are in use."""
        self._forget_written()
        while (lease := self._blocks.lease(1)) is None and self._writes:
            self._writes.popleft()[0].wait()
        return lease or self._blocks.beyond(1)  # where reads hold all others

    def _forget_written(self) -> None:
        """Give the blocks of writes back that are done."""
        while self._writes and self._writes[0][0].done:
            self._writes.popleft()

    def _recorded(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class _Filling(NamedTuple):
    """A block of pinned memory that pieces are written into."""

    number: int
    """Of the block, as the runs have it."""
    lease: PinnedLease
    block: Bytes


def _piece_shape(tensor: Tensor, piece: PageSlice) -> tuple[int, ...]:
    """Shape of a piece in bytes: [layers, planes, kv_heads, slots, slot_bytes]."""
    one = tensor[0, piece.box.layers, :, piece.box.heads, piece.first_slot : piece.first_slot + piece.slots]
    return (*one.shape[:-1], one.shape[-1] * one.element_size())
