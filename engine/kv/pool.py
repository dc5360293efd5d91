"""Paged KV pool of one stage: keys and values, and further tensors such as a latent."""

import errno
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.backends import PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.transfer.backends.strided_pool import c_order, placed
from headrace.transfer.protocol.layout import WHOLE, Box
from headrace.transfer.protocol.page_store import HostPool

_DTYPES = {**TORCH_DTYPES, "uint8": torch.uint8}  # as in ITEM_BYTES
Allocate = Callable[[Geometry, int], memoryview | None]  # memory for so many pages; None: the pool allocates its own


class PagedTensors(Protocol):
    """Tensors of pages in one memory, in any layout: what copies of pages need of a pool."""

    geometry: Geometry
    layout: PoolLayout
    """Where they lie."""
    memory: Tensor
    """All of it: uint8 [bytes]."""
    tensors: dict[str, Tensor]
    """By name, each [pages, layers, planes, kv_heads, page_size, head_dim]; states have slots, see Component."""


class KVPool(HostPool):
    """KV of all requests: one memory with a view of it per tensor of the geometry, such as keys and values or a latent.

    Memory is not initialised: read only slots that were written. Each tensor is contiguous, one after the other
    (transfer/backends/strided_pool.py, c_order). The first one, in most pools the only one, has three views:

        tensor  [pages, layers, planes, kv_heads, page_size, head_dim]
        blocks  [pages * layers * planes * kv_heads, page_size * head_dim]    a row per (page, layer, plane, head)
        slots   [pages * layers * planes * kv_heads * page_size, head_dim]    a row per token position of such a block

    So gathering or scattering any set of rows is one operation. Planes are keys and values, or the one of a latent.
    Different pages may be written by different threads. Pages that a plan writes are read when it is known to be done.
    On the CPU it is a SourceStore; for pools on GPUs see device_pages.py.
    """

    def __init__(self, geometry: Geometry, pages: int, device: str = "cpu", allocate: Allocate | None = None) -> None:
        """Allocate the pool.

        allocate: provides CPU memory, such as shared memory; None, or when it returns None, torch allocates.
        """
        self.geometry = geometry
        self.pages, self.page_size = pages, geometry.page_size
        self.layout = c_order(geometry, pages)
        buffer = allocate(geometry, pages) if allocate is not None else None
        if buffer is None:
            memory = torch.empty(geometry.pool_bytes(pages), dtype=torch.uint8, device=device)
        else:
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
        self.state_slots = geometry.slots_for(pages)
        """Requests that have a state here at a time."""
        self.memory = memory
        """All of it: uint8 [bytes]."""
        self.tensors = strided_tensors(memory, geometry, self.layout)
        """By name, each [pages, layers, planes, kv_heads, page_size, head_dim]; states have slots, see Component."""
        self.tensor = next(iter(self.tensors.values()))
        self._first = geometry.tensors[0]
        self.blocks: Tensor = self.tensor.view(-1, self.tensor.shape[-2] * self._first.head_dim)
        self.slots: Tensor = self.tensor.view(-1, self._first.head_dim)
        on_cpu = memory.device.type == "cpu"
        self._bytes: dict[str, NDArray[np.uint8]] | None = (
            {name: tensor.view(torch.uint8).numpy() for name, tensor in self.tensors.items()} if on_cpu else None
        )

    @property
    def blocks_per_layer(self) -> int:
        """Blocks of one layer of one page; heads of V follow those of K."""
        return self._first.planes * self._first.kv_heads

    @property
    def blocks_per_page(self) -> int:
        """Blocks of one page, over all layers."""
        return self._first.layers * self.blocks_per_layer

    def slots_from(self, layer: int) -> Tensor:
        """pool.slots without the rows before this layer of the first page: what is row n of layer 0 in pool.slots is
        row n here, so that no index is computed for a layer."""
        return self.slots[layer * self.blocks_per_layer * self.page_size :]

    @property
    def rows(self) -> NDArray[np.uint8] | None:
        """All pages as bytes [pages, page bytes]; None on a GPU and in a pool of several tensors, or of states."""
        if self._bytes is None or len(self._bytes) != 1 or self._first.per_request:
            return None
        return self._bytes[self._first.name].reshape(self.pages, -1)

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """Bytes of slots [first_slot, first_slot + count) of a page: uint8 [layers, planes, kv_heads, count, row
        bytes].

        page: of a state its slot. box: tensor, and range of layers and heads. A strided view of the pool. Raises
        IndexError for a page or slots outside the pool, KeyError for a tensor that it has not.
        """
        assert self._bytes is not None, "on a GPU"
        check_piece(self.tensors, page, first_slot, count, box)
        return self._bytes[box.tensor][page, box.layers, :, box.heads, first_slot : first_slot + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """Like view(), C-contiguous. Consecutive layers of a full page with all heads are a view of the pool; anything
        else is a copy. Raises what view() raises."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: NDArray[np.uint8], box: Box = WHOLE) -> None:
        """Set slots [first_slot, first_slot + count) from bytes of the shape that read() returns. Raises what view()
        raises."""
        self.view(page, first_slot, count, box)[...] = data


class DevicePool:
    """PagedTensors in the memory of a GPU, in a layout of its owner's choice; zeros at first."""

    def __init__(self, geometry: Geometry, layout: PoolLayout, device: str) -> None:
        """Raises OSError where the GPU has not as much memory, ValueError for a layout that does not hold the pages."""
        self.geometry, self.layout = geometry, layout
        try:
            self.memory = torch.zeros(layout.bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, f"{device} is out of memory") from error
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)  # what is written there comes on other streams
        self.tensors = strided_tensors(self.memory, geometry, layout)


def check_piece(tensors: Mapping[str, Tensor], page: int, first_slot: int, count: int, box: Box) -> None:
    """Raises IndexError for a page or slots outside a pool, KeyError for a tensor that it has not."""
    pages, _, _, _, size, _ = tensors[box.tensor].shape
    if not 0 <= page < pages:
        raise IndexError(f"page {page} is outside the pool of {pages}")
    if first_slot < 0 or count < 1 or first_slot + count > size:
        raise IndexError(f"slots [{first_slot}, {first_slot + count}) are outside a page of {size}")


def strided_tensors(memory: Tensor, geometry: Geometry, layout: PoolLayout) -> dict[str, Tensor]:
    """The tensors of a pool in its memory, uint8 [bytes], by name. Raises ValueError for a layout that leaves the
    memory, that divides elements, or that has different parts in one place."""
    tensors = {}
    for tensor, spot in placed(geometry, layout):
        count, positions = geometry.extent(tensor, layout.pages, layout.state_slots)
        shape = (count, tensor.layers, tensor.planes, tensor.kv_heads, positions, tensor.head_dim)
        dtype = _DTYPES[tensor.dtype]
        if any(step % dtype.itemsize for step in (spot.offset, *spot.strides)):
            raise ValueError(f"its layout of {tensor.name} divides elements of {dtype.itemsize} bytes")
        if any(not stride and length > 1 for stride, length in zip(spot.strides, shape, strict=False)):
            raise ValueError(f"its layout of {tensor.name} has different parts in one place")
        strides = (*(stride // dtype.itemsize for stride in spot.strides), 1)
        end = layout.bytes - (layout.bytes - spot.offset) % dtype.itemsize
        elements = memory[spot.offset : end].view(dtype)
        tensors[tensor.name] = elements.as_strided(shape, strides, elements.storage_offset())
    return tensors
