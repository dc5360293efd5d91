"""Shared memory backend: the peer's pool is a file in /dev/shm that the sending stage maps and copies into.

    owner (decode stage)                                     writer (prefill stage)
    unnamed file ─► memory ─► its lock ─► name               open, check, take the session's lock, map
    session ends: take that session's lock  ◄── free ──────  unmap, close; or the process ends

The writer writes only while it holds the session's lock, and once the owner has that, no writer can get it any more.
The kernel frees the locks of a process that ends, however it ends, and keeps those of one that is stopped. So the owner
never mistakes a silent writer for a dead one. Locks are of bytes, which need not exist (Linux open file description
locks, F_OFD_SETLK): they belong to the open file, not to the process, and end with its last descriptor.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash
from msgspec.structs import asdict

from headrace.core.types.kv.backends import NixlAccess, PoolLayout, PoolMemory, SharedMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.copying import copy, copy_rows
from headrace.transfer.backends.strided_pool import StridedPool
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed, SourcePages

FOLDER = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"headrace-kv-[0-9a-f]{32}")
_BLOCK = 512  # bytes, the unit of st_blocks
_FLOCK = "hhqqi0q"  # l_type, l_whence, l_start, l_len, l_pid
OWNER_BYTE = 0  # the byte that the owner of a pool holds for its lifetime


def host_token() -> str:
    """Identifies the /dev/shm that this process sees: equal for two processes if and only if they share it.

    Made of the kernel's boot id and the file system's device number, since containers on one machine have a /dev/shm
    each unless configured otherwise. "" if shared memory cannot be used.
    """
    if not _locks_available() or not _BOOT_ID.is_file() or not os.access(FOLDER, os.W_OK):
        return ""
    return f"{_BOOT_ID.read_text().strip()}.{FOLDER.stat().st_dev:x}"


def sweep() -> None:
    """Remove pools that were left behind by processes that ended without cleanup: files of our naming scheme whose
    owner's lock is free. (A new pool is locked before it gets its name.)"""
    if not _locks_available() or not FOLDER.is_dir():
        return
    for path in FOLDER.iterdir():
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if not _is_locked(file, OWNER_BYTE):
                    path.unlink()
            finally:
                os.close(file)


class SharedPool:
    """Memory of a pool that peers on this host may map. A RegisteredPool."""

    def __init__(self, layout: PoolLayout) -> None:
        """layout: of the pool, with any strides. Raises OSError if /dev/shm has not enough room."""
        sweep()
        size = layout.bytes
        self._file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(self._file, 0, size)  # writing into a hole raises SIGBUS when memory is short
            _lock(self._file, OWNER_BYTE)
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
        """The whole pool, writable."""
        return memoryview(self._map)

    @property
    def file(self) -> int:
        """Descriptor of the file, to map it again; it stays this object's."""
        return self._file

    def grant(self, session: str) -> None:
        """Hello has all that peers need."""

    def revoke(self, session: str, stage: int) -> bool:
        """Take the writer's lock; see the module docstring."""
        return _lock(self._file, writer_byte(session, stage))

    def close(self) -> None:
        """Remove the file name. The memory is freed with its last mapping."""
        self._path.unlink(missing_ok=True)


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
        self._file = os.open(FOLDER / memory.name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _check(os.fstat(self._file), memory)
            if not _is_locked(self._file, OWNER_BYTE):
                raise ValueError(f"the file {memory.name} has no owner")
            if not _lock(self._file, writer_byte(session, stage)):
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

    def close(self) -> None:
        """Unmap and release the writer's lock. Removes pools whose owners have ended."""
        self._pool = None
        self._map.close()  # it has a descriptor of its own
        os.close(self._file)
        sweep()


def _check(found: os.stat_result, memory: SharedMemory) -> None:
    """Raises ValueError unless the file is one that only this user can have made, fully allocated."""
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


def _lock(file: int, byte: int) -> bool:
    """Lock a byte of an open file, exclusively. Returns False if another open file holds it. Raises OSError."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_locked(file: int, byte: int) -> bool:
    """Whether another open file holds the lock."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _locks_available() -> bool:
    """Whether this system has such locks."""
    with contextlib.suppress(AttributeError):
        return fcntl.F_OFD_SETLK > 0
    return False


def writer_byte(session: str, stage: int) -> int:
    """Byte whose lock is the right of a stage to write in a session: 62 bits of xxh3_64 of "session/stage", plus 1."""
    return 1 + (xxhash.xxh3_64_intdigest(f"{session}/{stage}".encode()) >> 2)
