"""Staging area that prefill stages of the same machine write into themselves, in any layout of its owner's choice."""

import contextlib
import logging
import mmap
import os
from collections.abc import Mapping

from headrace.core.types.kv.backends import SHM, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.backends.shm import SharedPool
from headrace.transfer.backends.strided_pool import StridedPool
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import PageStore

log = logging.getLogger(__name__)


class SharedStaging(PageStore):
    """A StagingMemory over a file of memory, which its owner may map again.

    The file is in /dev/shm. Where that cannot be used, or has not enough room, it has no name, and KV comes in frames.
    """

    def __init__(self, geometry: Geometry, layout: PoolLayout) -> None:
        """geometry: of the whole model, with the size of the pages. layout: where they lie in the file; any strides.
        Raises OSError when memory is short, ValueError for a layout that does not hold the pages."""
        self.geometry, self.pages = geometry, layout.pages
        self.memory: PoolMemory | None = None
        self.registered_pools: Mapping[str, RegisteredPool] = {}
        with contextlib.ExitStack() as opened:
            shared = _share(layout)
            if shared is not None:
                opened.callback(shared.close)
                self.memory, self.registered_pools = PoolMemory(shm=shared.memory), {SHM: shared}
                self.file, self.buffer = shared.file, shared.buffer
            else:
                self.file = os.memfd_create("headrace-kv")
                opened.callback(os.close, self.file)
                os.posix_fallocate(self.file, 0, layout.bytes)
                self.buffer = memoryview(mmap.mmap(self.file, layout.bytes))
            self._pool = StridedPool(geometry, layout, self.buffer)
            self._opened = opened.pop_all()

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """See PageStore."""
        return self._pool.view(page, first_slot, count, box)

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """See PageStore."""
        return self._pool.read(page, first_slot, count, box)

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """See PageStore."""
        self._pool.write(page, first_slot, count, data, box)

    def close(self) -> None:
        """Remove the file. Mappings stay, and the memory goes with the last one."""
        self._opened.close()


def _share(layout: PoolLayout) -> SharedPool | None:
    """Memory in /dev/shm; None where there is none, or not enough."""
    try:
        if not host_token():
            raise OSError("/dev/shm cannot be used")
        return SharedPool(layout)
    except OSError as error:
        log.warning(
            "KV of prefill servers on this machine comes in frames: %.0f MiB in shared memory: %s",
            layout.bytes / (1 << 20),
            error,
        )
        return None
