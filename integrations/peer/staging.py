"""Where KV lands before its owner copies it into an engine's cache: one array, handed out in runs of pages."""

import numpy as np

from headrace.core.types.geometry import Geometry
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes

PAGE_TOKENS = 64


class PageRuns:
    """Hands out runs of consecutive pages, the first that fits from below, so that memory above is never touched."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free: list[tuple[int, int]] = [(0, pages)] if pages else []  # (first, count), apart and in order

    @property
    def free(self) -> int:
        return sum(count for _, count in self._free)

    def take(self, count: int) -> int | None:
        """The first page of a run; None when there is no such run now."""
        for index, (first, length) in enumerate(self._free):
            if length >= count:
                self._free[index : index + 1] = [(first + count, length - count)] if length > count else []
                return first
        return None

    def give(self, first: int, count: int) -> None:
        """Take a run back and join it with its neighbours."""
        self._free.append((first, count))
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for start, length in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined


class Staging:
    """A PageStore over one array of tokens. data: [layers, 2, kv_heads, tokens, head_dim * item_bytes] bytes; page p
    is the tokens [p * PAGE_TOKENS, (p + 1) * PAGE_TOKENS), so a run of pages is one slice of every head. Memory that
    was never written costs nothing."""

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        """geometry: of the whole model; its page size is set here. tokens: how many fit, rounded up to pages."""
        self.geometry = Geometry(geometry.dtype, geometry.layers, geometry.kv_heads, geometry.head_dim, PAGE_TOKENS)
        self.pages = -(-tokens // PAGE_TOKENS)
        shape = (geometry.layers, 2, geometry.kv_heads, self.pages * PAGE_TOKENS)
        self.data: Bytes = np.zeros((*shape, geometry.head_dim * geometry.item_bytes), np.uint8)

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        at = page * PAGE_TOKENS + first_slot
        return self.data[box.layers, :, box.heads, at : at + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self.view(page, first_slot, count, box)[...] = data
