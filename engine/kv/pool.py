"""Paged KV pool of one stage."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.geometry import Geometry
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.kv.device_copies import DeviceCopies
from headrace.transfer.protocol.layout import WHOLE, Box

Allocate = Callable[[Geometry, int], memoryview | None]  # memory for so many pages; None: the pool allocates its own


class KVPool:
    """Keys and values of all requests: [pages, layers, 2, kv_heads, page_size, head_dim], contiguous per page.

    Memory is not initialised: read only slots that were written. One tensor with three views:

        tensor  [pages, layers, 2, kv_heads, page_size, head_dim]
        blocks  [pages * layers * 2 * kv_heads, page_size * head_dim]    a row per (page, layer, K or V, head)
        slots   [pages * layers * 2 * kv_heads * page_size, head_dim]    a row per token position of such a block

    So gathering or scattering any set of rows is one operation. Different pages may be written by different threads.
    """

    def __init__(self, geometry: Geometry, pages: int, device: str = "cpu", allocate: Allocate | None = None) -> None:
        """Allocate the pool.

        allocate: provides CPU memory, such as shared memory; None, or when it returns None, torch allocates.
        """
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
        self._all_copies = [] if self._copies is None else [self._copies]  # of all threads

    @property
    def blocks_per_layer(self) -> int:
        """K and V blocks of one layer of one page; heads of V follow those of K."""
        return 2 * self.geometry.kv_heads

    @property
    def blocks_per_page(self) -> int:
        """K and V blocks of one page, over all layers."""
        return self.geometry.layers * self.blocks_per_layer

    @property
    def page_size(self) -> int:
        """Token positions of a page."""
        return self.geometry.page_size

    @property
    def rows(self) -> NDArray[np.uint8] | None:
        """All pages as bytes [pages, page bytes]; None on a GPU."""
        return self._bytes.reshape(self.pages, -1) if self._bytes is not None else None

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """Bytes of slots [first_slot, first_slot + count) of a page: uint8 [layers, 2, kv_heads, count, row bytes].

        box: range of layers and heads. On the CPU a strided view of the pool, on a GPU a copy. Raises IndexError for a
        page or slots outside the pool.
        """
        self._check(page, first_slot, count)
        if self._copies is not None:
            part = self.tensor[page, box.layers, :, box.heads, first_slot : first_slot + count]
            copied: NDArray[np.uint8] = self._copies.to_host(part).view(torch.uint8).numpy()
            return copied
        assert self._bytes is not None
        return self._bytes[page, box.layers, :, box.heads, first_slot : first_slot + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> NDArray[np.uint8]:
        """Like view(), C-contiguous. On the CPU, consecutive layers of a full page with all heads are a view of the
        pool; anything else is a copy. Raises IndexError."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: NDArray[np.uint8], box: Box = WHOLE) -> None:
        """Set slots [first_slot, first_slot + count) from bytes of the shape that read() returns. Raises IndexError."""
        self._check(page, first_slot, count)
        if self._bytes is not None:
            self._bytes[page, box.layers, :, box.heads, first_slot : first_slot + count] = data
            return
        values = torch.from_numpy(np.array(data)).view(self.tensor.dtype)
        assert self._copies is not None
        self._copies.to_device(self.tensor[page, box.layers, :, box.heads, first_slot : first_slot + count], values)

    def mark_computed(self) -> None:
        """Called by the compute thread after each plan. On a GPU, where the plan is only queued by then, later reads of
        its pages wait until it is done."""
        for copies in self._all_copies:
            copies.mark_computed()

    def device_copies(self) -> DeviceCopies | None:
        """Copies of pages for another thread than that of view(), read() and write(); None on the CPU. Call it before
        the first plan."""
        if self._copies is None:
            return None
        self._all_copies.append(DeviceCopies(self.tensor.device))
        return self._all_copies[-1]

    def _check(self, page: int, first_slot: int, count: int) -> None:
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} is outside the pool of {self.pages}")
        if first_slot < 0 or count < 1 or first_slot + count > self.geometry.page_size:
            raise IndexError(
                f"slots [{first_slot}, {first_slot + count}) are outside a page of {self.geometry.page_size}"
            )
