"""A PageStore over a plain numpy array, for programs that speak the protocol without torch."""

import numpy as np

from core.geometry import Geometry
from transfer.layout import WHOLE, Box, Bytes, frame_shape


class ArrayPageStore:
    """data: [pages, layers, 2, kv_heads, page_size, head_dim * item_bytes] bytes, zeroed unless they are given."""

    def __init__(self, geometry: Geometry, pages: int, memory: memoryview | None = None) -> None:
        shape = (pages, *frame_shape(geometry, geometry.page_size))
        self.data: Bytes = np.zeros(shape, np.uint8) if memory is None else np.ndarray(shape, np.uint8, memory)

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        return self.data[page, box.layers, :, box.heads, first_slot : first_slot + count]

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        return np.ascontiguousarray(self.view(page, first_slot, count, box))

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self.view(page, first_slot, count, box)[...] = data
