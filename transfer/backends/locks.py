"""File byte-range locks that the kernel releases when the holding process ends (Linux open file description locks).

They are F_OFD_SETLK locks: they belong to the open file, not to the process, and end with its last descriptor. The
bytes need not exist.
"""

import contextlib
import errno
import fcntl
import struct

import xxhash

_FLOCK = "hhqqi0q"  # l_type, l_whence, l_start, l_len, l_pid


def take(file: int, byte: int) -> bool:
    """Lock a byte of an open file, exclusively. Returns False if another open file holds it. Raises OSError."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_taken(file: int, byte: int) -> bool:
    """Whether another open file holds the lock."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


OWNER = 0  # the byte that the owner of a pool holds for its lifetime


def writer_byte(session: str, stage: int) -> int:
    """Byte whose lock is the right of a stage to write in a session: 62 bits of xxh3_64 of "session/stage", plus 1."""
    return 1 + (xxhash.xxh3_64_intdigest(f"{session}/{stage}".encode()) >> 2)


def available() -> bool:
    """Whether this system has such locks."""
    with contextlib.suppress(AttributeError):
        return fcntl.F_OFD_SETLK > 0
    return False
