"""The right to write into a pool, for processes of one host: locks on the bytes of a file in /dev/shm.

    owner (decode stage)                                     writer (prefill stage)
    unnamed file ─► its lock ─► name                         open, check, take the session's lock
    session ends: take that session's lock  ◄── free ──────  close; or the process ends

The writer writes only while it holds the session's lock, and once the owner has that, no writer can get it any more.
The kernel frees the locks of a process that ends, however it ends, and keeps those of one that is stopped. So the owner
never mistakes a silent writer for a dead one. Locks are of bytes, which need not exist (Linux open file description
locks, F_OFD_SETLK): they belong to the open file, not to the process, and end with its last descriptor.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
from pathlib import Path

import xxhash

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


class OwnedFile:
    """A file of a pool's owner, closed to other users, without a name until publish()."""

    def __init__(self, size: int) -> None:
        """size: bytes, all allocated. Raises OSError if /dev/shm has not enough room."""
        sweep()
        self.descriptor = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        """Stays this object's."""
        self.name = f"headrace-kv-{secrets.token_hex(16)}"
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # writing into a hole raises SIGBUS when memory is short
            _lock(self.descriptor, OWNER_BYTE)
        except OSError:
            os.close(self.descriptor)
            raise

    def publish(self) -> None:
        """Give it its name. Raises OSError."""
        folder = os.open(FOLDER, os.O_RDONLY)
        try:  # with a folder given, os.link follows the link in /proc to the file
            os.link(f"/proc/self/fd/{self.descriptor}", self.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)

    def take(self, session: str, stage: int) -> bool:
        """Take the lock of a writer, for good. False while that holds it."""
        return _lock(self.descriptor, writer_byte(session, stage))

    def unpublish(self) -> None:
        """Remove its name; its locks stay until the process ends."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of a file that was not published, and of its locks."""
        os.close(self.descriptor)


class WriterLock:
    """The right of a stage to write in a session, in the file of a pool's owner."""

    def __init__(self, name: str, size: int, session: str, stage: int) -> None:
        """Raises OSError, or ValueError for a file that is not as an owner makes it, of this size, or of a session that
        the owner has ended."""
        self.descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _check(os.fstat(self.descriptor), name, size)
            if not _is_locked(self.descriptor, OWNER_BYTE):
                raise ValueError(f"the file {name} has no owner")
            if not _lock(self.descriptor, writer_byte(session, stage)):
                raise ValueError("the peer has ended the session")
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Give the right up. Removes files whose owners have ended."""
        os.close(self.descriptor)
        sweep()


def writer_byte(session: str, stage: int) -> int:
    """Byte whose lock is the right of a stage to write in a session: 62 bits of xxh3_64 of "session/stage", plus 1."""
    return 1 + (xxhash.xxh3_64_intdigest(f"{session}/{stage}".encode()) >> 2)


def _check(found: os.stat_result, name: str, size: int) -> None:
    """Raises ValueError unless the file is one that only this user can have made, fully allocated."""
    problems = {
        "is no regular file": not stat.S_ISREG(found.st_mode),
        "belongs to another user": found.st_uid != os.geteuid(),
        "is open to other users": bool(found.st_mode & 0o077),
        f"has {found.st_size} bytes and not {size}": found.st_size != size,
        "has holes": found.st_blocks * _BLOCK < size,
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"the file {name} {problem}")


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
