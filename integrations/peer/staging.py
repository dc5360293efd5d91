"""Staging area: where KV arrives before its owner copies it into an engine's cache; allocated in runs of pages."""

import numpy as np
from msgspec.structs import replace

from headrace.core.types.geometry import Geometry, ceil_div
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, frame_shape

PAGE_TOKENS = 64  # per page of the staging area


class PageRunAllocator:
    """First-fit allocator of runs of consecutive pages: low pages first, so that higher memory stays untouched."""

    def __init__(self, pages: int) -> None:
        """pages: all free at first."""
        self.pages = pages
        self._free: list[tuple[int, int]] = [(0, pages)] if pages else []  # (first, count), not adjacent, in order

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return sum(count for _, count in self._free)

    def allocate(self, count: int) -> int | None:
        """First page of a run of count pages; None when no run is long enough."""
        for index, (first, length) in enumerate(self._free):
            if length >= count:
                self._free[index : index + 1] = [(first + count, length - count)] if length > count else []
                return first
        return None

    def free(self, first: int, count: int) -> None:
        """Free a run and merge it with its neighbours."""
        self._free.append((first, count))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class Staging:
    """A PageStore over one array, data: uint8 [layers, planes, kv_heads, tokens, head_dim * item_bytes], for the one
    tensor of a geometry: keys and values, or a latent.

    Page p is the tokens [p * PAGE_TOKENS, (p + 1) * PAGE_TOKENS), so a run of pages is one slice of every head. Memory
    is only taken by what was written.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        """geometry: of the whole model; its page size is replaced. tokens: capacity, rounded up to pages."""
        self.geometry = replace(geometry, page_size=PAGE_TOKENS)
        self.pages = ceil_div(tokens, PAGE_TOKENS)
        [tensor] = geometry.tensors
        self.data: Bytes = np.zeros(frame_shape(tensor, self.pages * PAGE_TOKENS), np.uint8)

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """View of slots [first_slot, first_slot + count): uint8 [layers, planes, kv_heads, count, row bytes]. box:
        range of layers and heads."""
        at = page * PAGE_TOKENS + first_slot
        return self.data[box.layers, :, box.heads, at : at + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """Like view(), as a C-contiguous array."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Set slots from data of view()'s shape."""
        self.view(page, first_slot, count, box)[...] = data
