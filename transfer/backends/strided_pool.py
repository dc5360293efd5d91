"""KV pools in memory with any strides: numpy views of what a PoolLayout describes, and the byte runs of a copy."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.types.kv.backends import Placement, PoolLayout, Strides
from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, frame_shape
from headrace.transfer.protocol.page_store import HostPool

Offsets = npt.NDArray[np.int64]


def c_order(geometry: Geometry, pages: int) -> PoolLayout:
    """Layout of a pool in C order: one tensor after the other, each [pages, layers, planes, kv_heads, page_size,
    head_dim] without gaps, with the slots that belong to so many pages."""
    at, slots = 0, geometry.slots_for(pages)
    places: dict[str, Placement] = {KV: Placement(name=KV, offset=0, strides=(0, 0, 0, 0, 0))}
    for tensor in geometry.tensors:
        count, positions = geometry.extent(tensor, pages, slots)
        places[tensor.name] = Placement(name=tensor.name, offset=at, strides=_strides(tensor, positions))
        at += count * positions * tensor.token_bytes
    kv = places.pop(KV)
    components = tuple(places.values())
    return PoolLayout(
        bytes=at, pages=pages, strides=kv.strides, offset=kv.offset, components=components, state_slots=slots
    )


def placed(geometry: Geometry, layout: PoolLayout) -> Iterator[tuple[Component, Placement]]:
    """The tensors of a pool with their places in its memory. Raises ValueError unless every slot of every page lies
    within the layout's memory."""
    places = {place.name: place for place in layout.components}
    places[KV] = Placement(name=KV, offset=layout.offset, strides=layout.strides)
    for tensor in geometry.tensors:
        place = places.get(tensor.name)
        if place is None:
            raise ValueError(f"its layout has no component {tensor.name}")
        count, positions = geometry.extent(tensor, layout.pages, layout.state_slots)
        last = [length - 1 for length in (count, *frame_shape(tensor, positions)[:4])]
        end = place.offset + sum(n * stride for n, stride in zip(last, place.strides, strict=True)) + tensor.slot_bytes
        if count and end > layout.bytes:
            raise ValueError(
                f"its pages of {tensor.name} do not lie within its {layout.bytes} bytes: they end at {end}"
            )
        yield tensor, place


def page_numbers(pages: Sequence[int], count: int) -> npt.NDArray[np.int32]:
    """Page ids as an array. Raises IndexError for a page outside a pool of this many pages."""
    numbers = np.asarray(pages, np.int32)
    if (wrong := numbers[(numbers < 0) | (numbers >= count)]).size:
        raise IndexError(f"page {wrong[0]} of {count} pages")
    return numbers


def check_slots(page: int, first_slot: int, count: int, pages: int, slots: int) -> None:
    """Raises IndexError for a page or slots outside a pool of so many pages of so many slots."""
    if not 0 <= page < pages or not 0 <= first_slot < first_slot + count <= slots:
        raise IndexError(f"slots {first_slot} to {first_slot + count} of page {page}: {pages} pages of {slots}")


class StridedPool(HostPool):
    """A PageStore over a writable buffer that a layout describes. Raises ValueError if the layout exceeds the
    buffer."""

    def __init__(self, geometry: Geometry, layout: PoolLayout, memory: Any) -> None:
        self.memory = memory
        self.tensors: dict[str, Bytes] = {}
        """By name, each of [pages, layers, planes, kv_heads, page_size, slot_bytes] bytes; states have slots, see
        Component."""
        self._pages, self.page_size = layout.pages, geometry.page_size
        for tensor, place in placed(geometry, layout):
            count, positions = geometry.extent(tensor, layout.pages, layout.state_slots)
            shape = (count, *frame_shape(tensor, positions))
            try:  # numpy checks that the array lies within the memory
                array: Bytes = np.ndarray(shape, np.uint8, memory, place.offset, (*place.strides, 1))
            except TypeError as error:
                raise ValueError(str(error)) from error
            self.tensors[tensor.name] = array

    @property
    def data(self) -> Bytes:
        """Keys and values."""
        return self.tensors[KV]

    @property
    def rows(self) -> Bytes | None:
        """All pages as [pages, bytes of a page], in place; None unless one tensor lies so, and alone."""
        first = next(iter(self.tensors.values()))
        alone = len(self.tensors) == 1 and len(first) == self._pages and first.flags.c_contiguous
        return first.reshape(self._pages, -1) if alone else None

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """View of slots in place. Raises IndexError for a page or slots outside the pool."""
        tensor = self.tensors[box.tensor]
        check_slots(page, first_slot, count, len(tensor), tensor.shape[4])
        return tensor[page, box.layers, :, box.heads, first_slot : first_slot + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """C-contiguous bytes of slots. Raises IndexError."""
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Copy data into slots. Raises IndexError."""
        self.view(page, first_slot, count, box)[...] = data


class ArrayPageStore(StridedPool):
    """A pool in C order, in zeroed memory unless a buffer is given: a PageStore for peers without torch."""

    def __init__(self, geometry: Geometry, pages: int, memory: memoryview | None = None) -> None:
        layout = c_order(geometry, pages)
        super().__init__(geometry, layout, np.zeros(layout.bytes, np.uint8) if memory is None else memory)


def _strides(tensor: Component, page_size: int) -> Strides:
    slot = tensor.slot_bytes
    head = page_size * slot
    plane = tensor.kv_heads * head
    layer = tensor.planes * plane
    return tensor.layers * layer, layer, plane, head, slot


class ByteRuns(NamedTuple):
    """Run i: `length` bytes at offset source[i] of the source and target[i] of the target, both in bytes."""

    source: Offsets
    target: Offsets
    length: int


def runs(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> ByteRuns:
    """The longest contiguous runs of a block of bytes of this shape, whose last axis is contiguous on both sides, for
    hardware that moves runs.

    source, target: strides of all other axes, in bytes.
    """
    *counts, length = shape
    axes = list(zip(counts, source, target, strict=True))
    while axes and (axes[-1][0] == 1 or axes[-1][1:] == (length, length)):
        length *= axes.pop()[0]
    here, there = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for count, stride, target_stride in axes:
        steps = np.arange(count, dtype=np.int64)
        here = (here[:, None] + steps * stride).reshape(-1)
        there = (there[:, None] + steps * target_stride).reshape(-1)
    return ByteRuns(here, there, length)
