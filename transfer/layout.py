"""Where KV lies on both sides, and what moves where. Pure arithmetic, and the seam to the pools' memory.

A side is a list of ranks, each with a pool for some layers and some KV heads; two ranks have in common what both own.
The canonical payload of tokens [start, start + count) between two ranks is one frame per source page that they touch,
each the C-contiguous bytes of [layers, 2, kv_heads, tokens in that page, head_dim] of that common part. Between ranks
of the same layers and heads a frame of a full page is the page itself.
"""

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from core.geometry import Geometry

Bytes = npt.NDArray[np.uint8]


class Box(msgspec.Struct, frozen=True):
    """Layers and heads of one pool, counted from its first ones."""

    layers: slice
    heads: slice


WHOLE = Box(slice(None), slice(None))


class Frame(msgspec.Struct, frozen=True):
    """A payload frame: slots [slot, slot + count) of the page-th page of the source's list."""

    page: int
    slot: int
    count: int


class Copy(msgspec.Struct, frozen=True):
    """Slots [source_slot, source_slot + count) of the source_page-th page of the source's list, of the layers and heads
    in source, go to slots [slot, slot + count) of the page-th page of the destination's list, to those in destination.
    The payload frame that carries them has the number source_page."""

    source_page: int
    source_slot: int
    source: Box
    page: int
    slot: int
    destination: Box
    count: int


class PageStore(Protocol):
    """A KV pool as the transfer sees it: pages of shape [layers, 2, kv_heads, page_size, head_dim * item_bytes]. How
    its memory is laid out is its own business."""

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """Bytes of the slots, [layers, 2, kv_heads, count, head_dim * item_bytes] with the layers and heads of the box,
        in place and strided where the pool can be read so, else a copy."""
        ...

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """C-contiguous bytes of the slots, [layers, 2, kv_heads, count, head_dim * item_bytes] with the layers and
        heads of the box. Layers of a whole page with all heads may be a view, which is then read until the peer has
        acknowledged it; anything less is a copy."""
        ...

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Copy data, of the same shape, into the slots. data may be read-only and strided; it is not kept."""
        ...


def pages_for(page_size: int, start: int, count: int) -> int:
    """Pages that positions [start, start + count) touch."""
    return (start + count - 1) // page_size - start // page_size + 1 if count else 0


def copies(source: Geometry, destination: Geometry, start: int, count: int) -> list[Copy]:
    """What moves of positions [start, start + count) between two ranks, in the order of positions; nothing when they
    have no layer or no head in common. The pairs of all ranks together move every byte once to every owner."""
    part = overlap(source, destination)
    if part is None:
        return []
    taken, put = box_in(source, part), box_in(destination, part)
    position, end, plan = start, start + count, []
    while position < end:
        source_page, source_slot = divmod(position, source.page_size)
        page, slot = divmod(position, destination.page_size)
        moved = min(source.page_size - source_slot, destination.page_size - slot, end - position)
        source_page -= start // source.page_size
        page -= start // destination.page_size
        plan.append(Copy(source_page, source_slot, taken, page, slot, put, moved))
        position += moved
    return plan


def frames_of(plan: list[Copy]) -> list[Frame]:
    """The payload frames that carry a plan, in order: one for each source page."""
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for copy in plan:
        first.setdefault(copy.source_page, copy.source_slot)
        count[copy.source_page] = count.get(copy.source_page, 0) + copy.count
    return [Frame(page, slot, count[page]) for page, slot in first.items()]


def frame_shape(part: Geometry, count: int) -> tuple[int, int, int, int, int]:
    """Shape of a payload frame of this many tokens, in bytes along the last axis."""
    return part.layers, 2, part.kv_heads, count, part.head_dim * part.item_bytes


def overlap(source: Geometry, destination: Geometry) -> Geometry | None:
    """The part of a source rank's KV that a destination rank takes: the source's geometry, cut to the layers and heads
    that both own. None when they share none."""
    layer = max(source.layer_start, destination.layer_start)
    head = max(source.head_start, destination.head_start)
    layers = min(source.layer_end, destination.layer_end) - layer
    heads = min(source.head_end, destination.head_end) - head
    if layers <= 0 or heads <= 0:
        return None
    return replace(source, layer_start=layer, layers=layers, head_start=head, kv_heads=heads)


def box_in(pool: Geometry, part: Geometry) -> Box:
    """Where a part lies in a pool that holds all of it."""
    layer, head = part.layer_start - pool.layer_start, part.head_start - pool.head_start
    return Box(slice(layer, layer + part.layers), slice(head, head + part.kv_heads))
