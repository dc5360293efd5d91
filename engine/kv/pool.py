"""The paged KV pool of one stage."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.geometry import Geometry
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.kv.device_copies import DeviceCopies
from headrace.transfer.protocol.layout import WHOLE, Box

Allocate = Callable[[Geometry, int], memoryview | None]  # for a pool of this many pages; None: take memory of your own


class KVPool:
    """Keys and values of all requests: [pages, layers, 2, kv_heads, page_size, head_dim], one block per page.

    Memory is not initialised: whoever reads a slot must know that it was written. One tensor, three views:
    `blocks` has a row per (page, layer, K or V, head) of page_size * head_dim elements, `slots` has a row per
    token position of such a block. A row's index is therefore a sum of multiples, and gathering or scattering any
    set of them is one operation. Writers of different pages may run in different threads.
    """

    def __init__(self, geometry: Geometry, pages: int, device: str = "cpu", allocate: Allocate | None = None) -> None:
        """allocate: gives the memory, on the CPU; None has torch allocate it."""
        self.geometry = geometry
        self.pages = pages
        shape = (pages, geometry.layers, 2, geometry.kv_heads, geometry.page_size, geometry.head_dim)
        dtype = TORCH_DTYPES[geometry.dtype]
        buffer = allocate(geometry, pages) if allocate is not None else None
        if buffer is None:
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            self.tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
        self.blocks: Tensor = self.tensor.view(-1, geometry.page_size * geometry.head_dim)
        self.slots: Tensor = self.tensor.view(-1, geometry.head_dim)
        on_cpu = self.tensor.device.type == "cpu"
        self._bytes: NDArray[np.uint8] | None = self.tensor.view(torch.uint8).numpy() if on_cpu else None
        self._copies = None if on_cpu else DeviceCopies(self.tensor.device)

    @property
    def blocks_per_layer(self) -> int:
        """K and V blocks of one layer of one page; heads of V follow those of K."""
        return 2 * self.geometry.kv_heads

    @property
    def blocks_per_page(self) -> int:
        return self.geometry.layers * self.blocks_per_layer

    @property
    def page_size(self) -> int:
        return self.geometry.page_size

    @property
    def rows(self) -> NDArray[np.uint8] | None:
        return self._bytes.reshape(self.pages, -1) if self._bytes is not None else None

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """Bytes of slots [first_slot, first_slot + count): [layers, 2, kv_heads, count, row bytes] with the layers and
        heads of the box; on the CPU a strided view of the pool, else a copy.
        """
        self._check(page, first_slot, count)
        if self._copies is not None:
            part = self.tensor[page, box.layers, :, box.heads, first_slot : first_slot + count]
            copied: NDArray[np.uint8] = self._copies.to_host(part).view(torch.uint8).numpy()
            return copied
        assert self._bytes is not None
        return self._bytes[page, box.layers, :, box.heads, first_slot : first_slot + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """The same, C-contiguous. On the CPU, consecutive layers of a full page with all heads are a view of the pool,
        anything else is a copy."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: NDArray[np.uint8], box: Box = WHOLE) -> None:
        """Set slots [first_slot, first_slot + count) from bytes in the shape that read returns."""
        self._check(page, first_slot, count)
        if self._bytes is not None:
            self._bytes[page, box.layers, :, box.heads, first_slot : first_slot + count] = data
            return
        values = torch.from_numpy(np.array(data)).view(self.tensor.dtype)
        assert self._copies is not None
        self._copies.to_device(self.tensor[page, box.layers, :, box.heads, first_slot : first_slot + count], values)

    def computed(self) -> None:
        """Called behind each plan by the thread that computes: its pages may be read once they are written, which
        on a GPU is later."""
        if self._copies is not None:
            self._copies.computed()

    def _check(self, page: int, first_slot: int, count: int) -> None:
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} is outside the pool of {self.pages}")
        if first_slot < 0 or count < 1 or first_slot + count > self.geometry.page_size:
            raise IndexError(
                f"slots [{first_slot}, {first_slot + count}) are outside a page of {self.geometry.page_size}"
            )
