"""Memory that the ranks of a group on one machine share, and how they find out that they are on one.

    every rank     host, whether it can, a random name ─► all-gather over the group there is ─► all can, on one host?
    first rank     makes memory and sockets, listens under its name ─► to each: memory, its ends of the sockets
    the others     connect, receive, map
    every rank     all have it? (all-gather)

The memory has no name (memfd) and the socket no file: nothing is left behind however the ranks end. Both sides of a
connection look at the user of the other.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.engine.collectives.operations import Collectives

MOST_RANKS = 64  # as in shared_sums.c
FORMING_S = 10.0  # until all ranks have the memory, or none uses it

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")  # abstract sockets are those of a network namespace
_HOST, _NAME = 32, 16  # bytes
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class SegmentPart(NamedTuple):
    """What one rank has of a segment: file descriptors, which it has to close."""

    memory: int
    sockets: tuple[int, ...]
    """One to each other rank, in order of rank."""

    def close(self) -> None:
        """Close all."""
        for each in (self.memory, *self.sockets):
            os.close(each)


class Segment:
    """A segment that this rank has mapped."""

    def __init__(self, part: SegmentPart, rank: int) -> None:
        """Takes the part over. Raises OSError when there is no address space."""
        self.size = len(part.sockets) + 1
        self.rank = rank
        self._part = part
        self._map = mmap.mmap(part.memory, 0)
        self._memory = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        self.address = ctypes.addressof(self._memory)
        own = (*part.sockets[:rank], -1, *part.sockets[rank:])
        self.sockets = (ctypes.c_int32 * self.size)(*own)
        """The socket to each rank, and -1."""

    def close(self) -> None:
        """Close the sockets, by which the others see that this rank has gone. The memory stays mapped while it is in
        use."""
        self._part.close()


def make_parts(size: int, memory_bytes: int) -> list[SegmentPart]:
    """A new segment of zeros, cut into the parts of all ranks. Raises OSError when memory or descriptors are short."""
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("headrace-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        stack.callback(os.close, memory)
        os.fchmod(memory, 0o600)
        os.posix_fallocate(memory, 0, memory_bytes)  # writing into a hole raises SIGBUS when memory is short
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        ends: dict[tuple[int, int], socket.socket] = {}
        for one in range(size):
            for other in range(one + 1, size):
                ends[one, other], ends[other, one] = map(stack.enter_context, socket.socketpair())
        memories = []
        with contextlib.ExitStack() as short:  # of descriptors; what follows cannot fail
            for _ in range(size):
                memories.append(os.dup(memory))
                short.callback(os.close, memories[-1])
            short.pop_all()
        return [
            SegmentPart(memories[rank], tuple(ends[rank, other].detach() for other in range(size) if other != rank))
            for rank in range(size)
        ]


def form_segment(group: Collectives, memory_bytes: int) -> Segment | None:
    """A segment of all ranks of a group; None on all of them if they are not on one host or one cannot map it.

    memory_bytes: its size; 0 if this rank cannot use one. All ranks have to call this at once. Raises LinkBroken when a
    rank is gone.
    """
    name, listener = secrets.token_bytes(_NAME), None
    host = _host() if memory_bytes and group.size <= MOST_RANKS else b""
    with contextlib.ExitStack() as stack:
        if group.rank == 0 and host:
            with contextlib.suppress(OSError):
                listener = stack.enter_context(_listen(name, group.size))
        able = bool(host) and (listener is not None or group.rank > 0)
        told = _told(group, (host if able else bytes(_HOST)) + name)
        if not any(told[0][:_HOST]) or any(each[:_HOST] != told[0][:_HOST] for each in told):
            return None
        segment, deadline = None, time.monotonic() + FORMING_S
        with contextlib.suppress(OSError):
            if listener is not None:
                part = _give(listener, make_parts(group.size, memory_bytes), deadline)
            else:
                part = _receive(told[0][_HOST:], group.rank, group.size, deadline)
            segment = _mapped(part, group.rank)
    if all(each == b"\1" for each in _told(group, bytes([segment is not None]))):
        return segment
    if segment is not None:
        segment.close()
    return None


def _mapped(part: SegmentPart, rank: int) -> Segment:
    try:
        return Segment(part, rank)
    except OSError:
        part.close()
        raise


def _told(group: Collectives, own: bytes) -> list[bytes]:
    """What each rank says, of equal length."""
    gathered = group.all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8)).wait()
    return [bytes(each.tolist()) for each in gathered.view(group.size, -1)]


def _host() -> bytes:
    """Equal for two processes if and only if one can connect to an abstract socket of the other; empty where there are
    none."""
    try:
        return hashlib.sha256(f"{_BOOT_ID.read_text()}{os.readlink(_NETWORK)}".encode()).digest()
    except OSError:
        return b""


def _address(name: bytes) -> bytes:
    return b"\0headrace-sums-" + name.hex().encode()


def _listen(name: bytes, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_address(name))
    listener.listen(backlog)
    return listener


def _give(listener: socket.socket, parts: Sequence[SegmentPart], deadline: float) -> SegmentPart:
    """Give each other rank the part that it asks for by its number. Returns the first part. Raises OSError when a rank
    does not ask in time."""
    waiting = dict(enumerate(parts))
    try:
        while len(waiting) > 1:
            listener.settimeout(_left(deadline))
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_left(deadline))
                asked = connection.recv(1) if _same_user(connection) else b""
                if asked and asked[0] in waiting:
                    part = waiting.pop(asked[0])
                    with contextlib.closing(part):
                        socket.send_fds(connection, [b"\0"], [part.memory, *part.sockets])
        return waiting.pop(0)
    finally:
        for part in waiting.values():
            part.close()


def _receive(name: bytes, rank: int, size: int, deadline: float) -> SegmentPart:
    """This rank's part. Raises OSError when the first rank does not give it in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_left(deadline))
        connection.connect(_address(name))
        if not _same_user(connection):
            raise PermissionError("the socket of the first rank is another user's")
        connection.sendall(bytes([rank]))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, size, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) != size:
        for each in descriptors:
            os.close(each)
        raise ConnectionError("the first rank has ended")
    return SegmentPart(descriptors[0], tuple(descriptors[1:]))


def _left(deadline: float) -> float:
    """Seconds, for a timeout."""
    return max(deadline - time.monotonic(), 0.001)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
