"""Shared memory backend: the peer's pool is a file in /dev/shm that the sending stage maps and copies into.

    owner (decode stage)                                     writer (prefill stage)
    unnamed file ─► memory ─► its lock ─► name               open, check, take the session's lock, map
    session ends: take that session's lock  ◄── free ──────  unmap, close; or the process ends

The locks are on bytes of that file: see writer_locks.py.
"""

import mmap
from collections.abc import Sequence

from msgspec.structs import asdict

from headrace.core.types.kv.backends import NixlAccess, PoolLayout, PoolMemory, SharedMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.copying import copy, copy_rows
from headrace.transfer.backends.strided_pool import StridedPool
from headrace.transfer.backends.writer_locks import OwnedFile, WriterLock, host_token
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed, SourcePages


class SharedPool:
    """Memory of a pool that peers on this host may map. A RegisteredPool."""

    def __init__(self, layout: PoolLayout) -> None:
        """layout: of the pool, with any strides. Raises OSError if /dev/shm has not enough room."""
        self._file = OwnedFile(layout.bytes)
        try:
            self._map = mmap.mmap(self._file.descriptor, layout.bytes)
            self._file.publish()
        except OSError:
            self._file.close()
            raise
        self.memory = SharedMemory(host=host_token(), name=self._file.name, **asdict(layout))

    @property
    def buffer(self) -> memoryview:
        """The whole pool, writable."""
        return memoryview(self._map)

    @property
    def file(self) -> int:
        """Descriptor of the file, to map it again; it stays this object's."""
        return self._file.descriptor

    def grant(self, session: str) -> None:
        """Hello has all that peers need."""

    def revoke(self, session: str, stage: int) -> bool:
        """Take the writer's lock."""
        return self._file.take(session, stage)

    def close(self) -> None:
        """Remove the file name. The memory is freed with its last mapping."""
        self._file.unpublish()


class ShmTransport:
    """Transport of a stage to pools on its host."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "ShmPages":
        """Map the peer's pool. Raises OSError or ValueError."""
        if memory.shm is None:
            raise ValueError("the peer named no shared memory")
        return ShmPages(session, stage, geometry, memory.shm)


class ShmPages(RemotePages):
    """A peer's pool, mapped into this process."""

    def __init__(self, session: str, stage: int, geometry: Geometry, memory: SharedMemory) -> None:
        self._lock = WriterLock(memory.name, memory.bytes, session, stage)
        try:
            self._map = mmap.mmap(self._lock.descriptor, memory.bytes)
        except (OSError, ValueError):
            self._lock.close()
            raise
        self._pool: StridedPool | None = None
        try:
            self._pool = StridedPool(geometry, memory, self._map)
        except ValueError:
            self.close()
            raise

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Copied when it returns."""
        assert self._pool is not None, "closed"
        copy(self._pool.view(page, first_slot, count, box), data)

    def write_pages(self, pages: Sequence[int], store: SourcePages, own: Sequence[int]) -> None:
        """Copied when it returns."""
        assert self._pool is not None, "closed"
        target, source = self._pool.rows, store.rows
        if target is None or source is None:
            super().write_pages(pages, store, own)
        else:
            copy_rows(target, pages, source, own)

    def flush(self) -> Completed:
        """Done at once."""
        return Completed()

    def close(self) -> Completed:
        """Unmap and release the writer's lock."""
        self._pool = None
        self._map.close()  # it has a descriptor of its own
        self._lock.close()
        return Completed()
