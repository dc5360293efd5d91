"""KV layout mapping between two sides with different page sizes, TP and PP: what moves where. Pure arithmetic.

A side is a list of ranks, each with a pool that holds some layers and some heads of one or several tensors: keys and
values, and the components beside them. Two ranks have in common what both own. The canonical payload of tokens
[start, start + count) between two ranks is, for each tensor they share, one frame per source page that the tokens
touch: the C-contiguous bytes of [layers, planes, kv_heads, tokens in that page, head_dim] of the common part. Between
ranks of the same layers and heads a frame of a full page is the page itself. Of states of a request, which the last
payload has, the frame is [layers, planes, kv_heads, 1, head_dim]; of a window of its positions there is one of those in
the first lap around the ring, and one of those in the second.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headrace.core.types.kv.geometry import KV, Component, Geometry, ceil_div, pages_spanned

Bytes = npt.NDArray[np.uint8]


class Box(msgspec.Struct, frozen=True):
    """Range of layers and heads of one tensor of a pool, counted from the pool's first ones."""

    layers: slice
    heads: slice
    tensor: str = KV


STATE = -1  # in the place of a page's index: the slot of the request's states, which follows the pages in a list
WHOLE = Box(slice(None), slice(None))
_NO_KV = Component(KV, "", layers=0, kv_heads=0, head_dim=0)


class Frame(msgspec.Struct, frozen=True):
    """A payload frame: slots [slot, slot + count) of one source page, for a range of layers and heads."""

    part: Component
    """The range of layers and heads as a tensor of its own."""
    box: Box
    """Where this range is in the source's pool."""
    page: int
    """Index in the source's list of pages, or STATE."""
    slot: int
    """Of a state, a place of its ring."""
    count: int
    """Tokens."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, planes, kv_heads, tokens, slot_bytes]."""
        return frame_shape(self.part, self.count)

    @property
    def bytes(self) -> int:
        """Size of the frame."""
        return self.part.token_bytes * self.count


class Copy(msgspec.Struct, frozen=True):
    """Copy of slots [source_slot, source_slot + count) of a source page to [slot, slot + count) of a destination
    page."""

    part: Component
    """The layers and heads that move, as a tensor of their own."""
    source_page: int
    """Index in the source's list of pages."""
    source_slot: int
    source: Box
    """Where the layers and heads are in the source's pool."""
    page: int
    """Index in the destination's list of pages."""
    slot: int
    destination: Box
    """Where the layers and heads are in the destination's pool."""
    count: int
    """Tokens."""


class Carried(NamedTuple):
    """A payload frame and the copies it carries."""

    frame: Frame
    copies: list[Copy]


def pages_for(page_size: int, start: int, count: int) -> int:
    """Pages that positions [start, start + count) touch."""
    return pages_spanned(start, start + count, page_size) if count else 0


def whole_pages(source: Geometry, destination: Geometry, start: int, count: int) -> range:
    """Index range of pages copied whole, in the page lists of positions [start, start + count).

    Those are the full pages, the i-th of the source's list to the i-th of the destination's, between ranks with the
    same layers and heads of one tensor, such as keys and values, and of no other.
    """
    if source != destination or len(source.tensors) != 1 or source.state_bytes:
        return range(0)
    size = source.page_size
    first = start // size
    begin = ceil_div(start, size)
    return range(begin - first, max(begin, (start + count) // size) - first)


def copies(source: Geometry, destination: Geometry, start: int, count: int, states: bool = False) -> list[Copy]:
    """Copies that move positions [start, start + count) between two ranks: tensor by tensor in the source's order,
    each in the order of positions, and then the request's states if these go with them. Empty if the ranks have no
    layer or no head in common. The pairs of all ranks together move every byte once to every owner.
    """
    period = lcm(source.page_size, destination.page_size)  # page boundaries of both sides coincide every period
    moves = _copies(source, destination, start % period, count)
    return [*moves, *_state_copies(source, destination, start + count)] if states else list(moves)


def _state_copies(source: Geometry, destination: Geometry, end: int) -> Iterator[Copy]:
    """Copies of the states behind so many tokens."""
    for ours, theirs, part in _shared(source, destination):
        if part.per_request:
            for place, count in _ring_runs(part, end):
                yield Copy(part, STATE, place, box_in(ours, part), STATE, place, box_in(theirs, part), count)


def _ring_runs(part: Component, end: int) -> Iterator[tuple[int, int]]:
    """Places and counts of what is sent of a state behind so many tokens, in the order of positions."""
    position = max(0, end - part.window) if part.window else 0
    last = end if part.window else 1
    while position < last:
        place = position % part.positions
        count = min(last - position, part.positions - place)
        yield place, count
        position += count


@lru_cache(maxsize=256)
def _copies(source: Geometry, destination: Geometry, start: int, count: int) -> tuple[Copy, ...]:
    position, end = start, start + count
    moves: list[tuple[int, int, int, int, int]] = []
    while position < end:
        source_page, source_slot = divmod(position, source.page_size)
        page, slot = divmod(position, destination.page_size)
        moved = min(source.page_size - source_slot, destination.page_size - slot, end - position)
        source_page -= start // source.page_size
        page -= start // destination.page_size
        moves.append((source_page, source_slot, page, slot, moved))
        position += moved
    parts = [
        (part, box_in(ours, part), box_in(theirs, part))
        for ours, theirs, part in _shared(source, destination)
        if not part.per_request
    ]
    return tuple(
        Copy(part, source_page, source_slot, taken, page, slot, put, moved)
        for part, taken, put in parts
        for source_page, source_slot, page, slot, moved in moves
    )


def carried(plan: list[Copy]) -> Iterator[Carried]:
    """Payload frames that carry these copies, in order: per tensor, one per source page, or per lap of a ring."""
    starts = [at for at in range(len(plan)) if not at or not _follows(plan[at - 1], plan[at])]
    for begin, end in pairwise([*starts, len(plan)]):
        moves = plan[begin:end]
        first, last = moves[0], moves[-1]
        count = last.source_slot + last.count - first.source_slot
        yield Carried(Frame(first.part, first.source, first.source_page, first.source_slot, count), moves)


def _follows(before: Copy, copy: Copy) -> bool:
    """Whether a copy takes the slots behind those of another, in the same page of the same tensor."""
    same = (before.part.name, before.source_page) == (copy.part.name, copy.source_page)
    return same and before.source_slot + before.count == copy.source_slot


def frame_shape(part: Component, count: int) -> tuple[int, int, int, int, int]:
    """Shape of a payload frame of this many tokens, in bytes along the last axis."""
    return part.layers, part.planes, part.kv_heads, count, part.slot_bytes


def overlap(source: Geometry, destination: Geometry) -> Geometry | None:
    """The part of a source rank's KV that a destination rank takes: the source's geometry, cut to the layers and heads
    that both own. None when they share none."""
    parts = [part for _, _, part in _shared(source, destination)]
    if not parts:
        return None
    kv = next((part for part in parts if part.name == KV), _NO_KV)
    return replace(
        source,
        layers=kv.layers,
        kv_heads=kv.kv_heads,
        layer_start=kv.layer_start,
        head_start=kv.head_start,
        components=tuple(part for part in parts if part.name != KV),
    )


def common(one: Component, other: Component) -> Component | None:
    """The layers and heads of a tensor that two ranks both own; None when there are none."""
    layer = max(one.layer_start, other.layer_start)
    head = max(one.head_start, other.head_start)
    layers = min(one.layer_end, other.layer_end) - layer
    heads = min(one.head_end, other.head_end) - head
    if layers <= 0 or heads <= 0:
        return None
    return replace(one, layer_start=layer, layers=layers, head_start=head, kv_heads=heads)


def box_in(pool: Component, part: Component) -> Box:
    """Where a part lies in a pool's tensor that holds all of it."""
    layer, head = part.layer_start - pool.layer_start, part.head_start - pool.head_start
    return Box(slice(layer, layer + part.layers), slice(head, head + part.kv_heads), part.name)


def _shared(source: Geometry, destination: Geometry) -> Iterator[tuple[Component, Component, Component]]:
    """Tensors that both ranks have some of: the source's, the destination's, and what they have in common."""
    theirs = {tensor.name: tensor for tensor in destination.tensors}
    for ours in source.tensors:
        if ours.name in theirs and (part := common(ours, theirs[ours.name])) is not None:
            yield ours, theirs[ours.name], part
