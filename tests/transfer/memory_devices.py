"""Pools of GPUs, in memory and under a virtual clock: pages come to host memory and go back in their time.

Each piece is copied when its time has come, so one that is read after its page was given away is another's, and one
that is written after that damages another request.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import PageSlice
from tests.transfer.memory_zmq import Network

NO_ROOM = 0.2  # of reads, those that there is no room for now


class Copying:
    """Pieces under way: a Handle and, of a read, its pages."""

    rows = None

    def __init__(self, page_size: int, count: int) -> None:
        self.page_size = page_size
        self.left = count
        self.copied: list[tuple[PageSlice, Bytes]] = []

    @property
    def done(self) -> bool:
        return self.left == 0

    @property
    def pages(self) -> "Copying":
        assert self.done, "taken before it was in host memory"
        return self

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        for piece, data in self.copied:
            skipped = first_slot - piece.first_slot
            if (piece.page, piece.box.tensor) == (page, box.tensor) and 0 <= skipped <= piece.slots - count:
                return data[:, :, :, skipped : skipped + count]
        raise AssertionError(f"slots {first_slot} to {first_slot + count} of page {page} were not asked for")

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        return np.ascontiguousarray(self.view(page, first_slot, count, box))


class DevicePool(ArrayPageStore):
    """A SourceStore whose copies take up to longest_s each."""

    def __init__(self, network: Network, geometry: Geometry, pages: int, longest_s: float = 0.3) -> None:
        super().__init__(geometry, pages)
        self._network = network
        self._longest_s = longest_s
        self._batch: list[tuple[PageSlice, Bytes]] = []

    def begin_read(self, pieces: Iterable[PageSlice], held: int = 0) -> Any:
        if self._network.random.random() < NO_ROOM:
            return None
        wanted = list(pieces)
        reading = Copying(self.page_size, len(wanted))
        for piece in wanted:
            self._later(reading, partial(self._take, reading, piece, self.read(*piece).copy()))
        return reading

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self._batch.append((PageSlice(page, first_slot, count, box), data))

    def flush(self) -> Copying:
        batch, self._batch = self._batch, []
        writing = Copying(self.page_size, len(batch))
        for piece, data in batch:
            self._later(writing, partial(super().write, *piece[:3], data.copy(), piece.box))
        return writing

    def _take(self, reading: Copying, piece: PageSlice, promised: Bytes) -> None:
        found = self.read(*piece).copy()
        assert (found == promised).all(), "pages have changed while they were read (G3)"
        reading.copied.append((piece, found))

    def _later(self, copying: Copying, action: Callable[[], None]) -> None:
        def happen() -> None:
            action()
            copying.left -= 1

        self._network.after(self._network.random.uniform(0, self._longest_s), happen)
