"""Shared memory: the peer's pool is a file in /dev/shm, which the sending stage maps and writes into, with one copy.

    owner (decode stage)                                     writer (prefill stage)
    unnamed file ─► memory ─► its lock ─► name               open, check, take the session's lock, map
    session over: take that session's lock  ◄── free ──────  unmap, close; or the process ends

The writer writes only while it holds the session's lock, and once the owner has that, no writer can get it any more.
The kernel frees the locks of a process that ends, however it ends, and keeps those of one that is stopped. So the owner
never takes a silent writer for a dead one.
"""

import contextlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict

from headrace.core.types.backends import NixlAccess, PoolMemory, SharedMemory
from headrace.core.types.geometry import Geometry
from headrace.transfer.backends import locks
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.copying import copy, copy_rows
from headrace.transfer.backends.fake import CompletedWrite
from headrace.transfer.backends.strided_pool import StridedPool, c_order
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, SourceStore

FOLDER = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"headrace-kv-[0-9a-f]{32}")
_BLOCK = 512  # bytes, the unit of st_blocks


def host_token() -> str:
    """Equal for processes that see the same /dev/shm, and for no others; "" where there is none of use. The kernel's
    boot id and its number of the file system: containers of one machine have a /dev/shm each unless they share it."""
    if not locks.available() or not _BOOT_ID.is_file() or not os.access(FOLDER, os.W_OK):
        return ""
    return f"{_BOOT_ID.read_text().strip()}.{FOLDER.stat().st_dev:x}"


def sweep() -> None:
    """Remove the pools of processes that have ended without doing so. Ours have a name of their own, and their owner's
    lock is there before the name is."""
    for path in FOLDER.iterdir():
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if not locks.is_taken(file, locks.OWNER):
                    path.unlink()
            finally:
                os.close(file)


class SharedPool:
    """The memory of a pool that peers on this host may map. An Exposure."""

    def __init__(self, geometry: Geometry, pages: int) -> None:
        """Raises OSError when /dev/shm cannot give that much."""
        sweep()
        layout = c_order(geometry, pages)
        size = layout.bytes
        self._file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(self._file, 0, size)  # a file with holes would kill whoever writes when memory is short
            locks.take(self._file, locks.OWNER)
            self._map = mmap.mmap(self._file, size)
            self._path = FOLDER / f"headrace-kv-{secrets.token_hex(16)}"
            folder = os.open(FOLDER, os.O_RDONLY)
            try:  # with a folder given, os.link follows the link in /proc to the file
                os.link(f"/proc/self/fd/{self._file}", self._path.name, dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        except OSError:
            os.close(self._file)
            raise
        self.memory = SharedMemory(host=host_token(), name=self._path.name, **asdict(layout))

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)

    def grant(self, session: str) -> None:
        """The hello has said it all."""

    def revoke(self, session: str, stage: int) -> bool:
        return locks.take(self._file, locks.writer_byte(session, stage))

    def close(self) -> None:
        """Remove the name. The memory lives as long as somebody has it mapped."""
        self._path.unlink(missing_ok=True)


class ShmTransport:
    """The Reach of a stage to pools on its host."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "ShmPages":
        if memory.shm is None:
            raise ValueError("the peer named no shared memory")
        return ShmPages(session, stage, geometry, memory.shm)


class ShmPages(RemotePages):
    """A peer's pool, mapped."""

    def __init__(self, session: str, stage: int, geometry: Geometry, memory: SharedMemory) -> None:
        self._file = os.open(FOLDER / memory.name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _check(os.fstat(self._file), memory)
            if not locks.is_taken(self._file, locks.OWNER):
                raise ValueError(f"the file {memory.name} is nobody's pool")
            if not locks.take(self._file, locks.writer_byte(session, stage)):
                raise ValueError("the peer has ended the session")
            self._map = mmap.mmap(self._file, memory.bytes)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._pool: StridedPool | None = None
        try:
            self._pool = StridedPool(geometry, memory, self._map)
        except ValueError:
            self.close()
            raise

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        assert self._pool is not None, "closed"
        copy(self._pool.view(page, first_slot, count, box), data)

    def write_pages(self, pages: Sequence[int], store: SourceStore, own: Sequence[int]) -> None:
        assert self._pool is not None, "closed"
        target, source = self._pool.rows, store.rows
        if target is None or source is None:
            super().write_pages(pages, store, own)
        else:
            copy_rows(target, pages, source, own)

    def flush(self) -> CompletedWrite:
        return CompletedWrite()

    def close(self) -> None:
        """Unmap, and let go of the lock. Removes what an owner that has ended left behind."""
        self._pool = None
        self._map.close()  # it has a descriptor of its own
        os.close(self._file)
        sweep()


def _check(found: os.stat_result, memory: SharedMemory) -> None:
    """Raises ValueError unless the file is what only a peer of the same user can have put there, complete in memory."""
    problems = {
        "is no regular file": not stat.S_ISREG(found.st_mode),
        "belongs to another user": found.st_uid != os.geteuid(),
        "is open to other users": bool(found.st_mode & 0o077),
        f"has {found.st_size} bytes and not {memory.bytes}": found.st_size != memory.bytes,
        "has holes": found.st_blocks * _BLOCK < memory.bytes,
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"the file {memory.name} {problem}")
