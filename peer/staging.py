"""Staging area: where KV arrives before its owner copies it into an engine's cache; allocated in runs of pages."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from headrace.core.types.kv.backends import PoolMemory
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, frame_shape
from headrace.transfer.protocol.page_store import PageStore

PAGE_TOKENS = 64  # per page of the staging area, unless its owner wants another size


class StagingMemory(PageStore, Protocol):
    """What a peer thread needs of a staging area."""

    @property
    def geometry(self) -> Geometry:
        """Of the whole model, with the staging area's page size."""
        ...

    @property
    def pages(self) -> int:
        """How many there are."""
        ...

    @property
    def registered_pools(self) -> Mapping[str, RegisteredPool]:
        """By backend, the area as prefill stages may write into it; empty where KV only comes in frames."""
        ...

    @property
    def memory(self) -> PoolMemory | None:
        """How they reach it; None where they cannot."""
        ...


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


class Staging(PageStore):
    """A PageStore over one array, data: uint8 [layers, planes, kv_heads, tokens, head_dim * item_bytes], for the one
    tensor of a geometry: keys and values, or a latent.

    Page p is the tokens [p * page_tokens, (p + 1) * page_tokens), so a run of pages is one slice of every head. Memory
    is only taken by what was written. KV comes in frames.
    """

    memory = None
    registered_pools: Mapping[str, RegisteredPool] = MappingProxyType({})

    def __init__(self, geometry: Geometry, tokens: int, page_tokens: int = PAGE_TOKENS) -> None:
        """geometry: of the whole model; its page size is replaced. tokens: capacity, rounded up to pages."""
        self.geometry = replace(geometry, page_size=page_tokens)
        self.pages = ceil_div(tokens, page_tokens)
        [tensor] = geometry.tensors
        self.data: Bytes = np.zeros(frame_shape(tensor, self.pages * page_tokens), np.uint8)

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """View of slots [first_slot, first_slot + count): uint8 [layers, planes, kv_heads, count, row bytes]. box:
        range of layers and heads."""
        at = page * self.geometry.page_size + first_slot
        return self.data[box.layers, :, box.heads, at : at + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """Like view(), as a C-contiguous array."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Set slots from data of view()'s shape."""
        self.view(page, first_slot, count, box)[...] = data
