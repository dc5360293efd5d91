"""Where token positions lie in pages, on both sides. Pure arithmetic, and the seam to the pools' memory.

The canonical payload of tokens [start, start + count) is one frame per source page that they touch, each the
C-contiguous bytes of [layers, 2, kv_heads, tokens in that page, head_dim]; a full page is the page itself. Stages may
own other layers on the two sides: a payload then holds the layers that both stages own, as a run of the page.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from core.geometry import Geometry

Bytes = npt.NDArray[np.uint8]
ALL_LAYERS = slice(None)


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots [slot, slot + count) of the index-th page of a page list."""

    index: int
    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens [offset, offset + count) of the frame-th payload frame go to slots [slot, slot + count) of the
    index-th page of the destination's list."""

    frame: int
    offset: int
    index: int
    slot: int
    count: int


class PageStore(Protocol):
    """A KV pool as the transfer sees it: pages of shape [layers, 2, kv_heads, page_size, head_dim * item_bytes]."""

    def read(self, page: int, first_slot: int, count: int, layers: slice = ALL_LAYERS) -> Bytes:
        """C-contiguous bytes of the slots, [layers, 2, kv_heads, count, head_dim * item_bytes]. Layers of a whole page
        may be a view, which is then read until the peer has acknowledged it; anything less is a copy."""
        ...

    def write(self, page: int, first_slot: int, count: int, data: Bytes, layers: slice = ALL_LAYERS) -> None:
        """Copy data, of the same shape, into the slots. data may be read-only and strided; it is not kept."""
        ...


def segments(page_size: int, start: int, count: int) -> list[Segment]:
    """Cut positions [start, start + count) at page borders. The page list's first page holds position start."""
    first, end = start // page_size, start + count
    cuts = []
    while start < end:
        index, slot = divmod(start, page_size)
        taken = min(page_size - slot, end - start)
        cuts.append(Segment(index - first, slot, taken))
        start += taken
    return cuts


def pages_for(page_size: int, start: int, count: int) -> int:
    """Pages that positions [start, start + count) touch."""
    return (start + count - 1) // page_size - start // page_size + 1 if count else 0


def copies(source: Geometry, destination: Geometry, start: int, count: int) -> list[Copy]:
    """Map the payload frames of positions [start, start + count) to the destination's page slots."""
    plan = []
    position = start
    for frame, segment in enumerate(segments(source.page_size, start, count)):
        offset = 0
        for part in segments(destination.page_size, position, segment.count):
            index = position // destination.page_size - start // destination.page_size + part.index
            plan.append(Copy(frame, offset, index, part.slot, part.count))
            offset += part.count
        position += segment.count
    return plan


def frame_bytes(source: Geometry, start: int, count: int) -> list[int]:
    """Exact sizes of the payload frames of positions [start, start + count)."""
    return [segment.count * source.token_bytes for segment in segments(source.page_size, start, count)]


def frame_shape(source: Geometry, count: int) -> tuple[int, int, int, int, int]:
    """Shape of a payload frame of this many tokens, in bytes along the last axis."""
    return source.layers, 2, source.kv_heads, count, source.head_dim * source.item_bytes


def overlap(source: Geometry, destination: Geometry) -> Geometry | None:
    """The part of a source stage's KV that a destination stage takes: the source's geometry, cut to the layers that
    both own. None when they share no layer, or hold different heads."""
    if (source.head_start, source.kv_heads) != (destination.head_start, destination.kv_heads):
        return None
    start = max(source.layer_start, destination.layer_start)
    end = min(source.layer_end, destination.layer_end)
    return replace(source, layer_start=start, layers=end - start) if start < end else None


def layers_in(pool: Geometry, part: Geometry) -> slice:
    """Where the layers of a part lie in a pool that holds them all."""
    first = part.layer_start - pool.layer_start
    return slice(first, first + part.layers)
