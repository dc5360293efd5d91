"""Length-prefixed messages over a Unix socket, between two processes of a server: [length, 4 bytes][message].

There is no I/O thread, so a message costs one wake-up of the receiving process; a ZMQ socket costs three, which are
most of the time of a short request on an idle server.

    scheduler: admit() ◄──── inner end │ door │ outer end ◄──── connect(): a stage, started by the parent of both

A door is a pair of sockets that both processes inherit. Who connects makes a pair of its own and passes one end of it
through the door: there is no path in a file system that could be removed, nor one that others could connect to.
"""

import errno
import os
import socket
import struct
import sys
from collections import deque

DOOR = "fd://"  # scheme of endpoints, before the descriptor of the outer or inner end of a door
LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # process, user, group
READ_BYTES = 1 << 18  # read per pass, so that one connection cannot starve the others of a loop
UNSENT_WAIT_S = 0.002  # until a loop calls flush() again, when the socket's buffer was full
UNSENT_BYTES = 256 << 20  # limit of the send queue; reaching it means that the other process hangs


class ConnectionClosed(Exception):
    """The other end has closed the connection, does not read, or does not exist."""


def make_door() -> tuple[socket.socket, socket.socket]:
    """The inner and the outer end of a door."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


def opened(endpoint: str) -> socket.socket:
    """An end of a door that this process has inherited. Closing it leaves the inherited descriptor open."""
    return socket.fromfd(int(endpoint.removeprefix(DOOR)), socket.AF_UNIX, socket.SOCK_DGRAM)


def connect(outer: socket.socket) -> "FrameSocket":
    """Connect to the process that has the inner end, now or later. Raises ConnectionClosed if it has ended."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(outer, [b"\0"], [theirs.fileno()])
    except OSError as error:
        ours.close()
        raise ConnectionClosed(f"no process is behind the door: {error.strerror}") from error
    return FrameSocket(ours)


def admit(inner: socket.socket) -> "FrameSocket":
    """The connection that waits at a door. Raises BlockingIOError if none does, another OSError if there is no
    descriptor for it: it goes on waiting."""
    os.close(os.dup(inner.fileno()))  # the kernel drops the connection if it finds no descriptor while it is received
    _, received, _, _ = socket.recv_fds(inner, 1, 1)
    if not received:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    os.set_inheritable(received[0], False)
    return FrameSocket(socket.socket(fileno=received[0]))


class FrameSocket:
    """One end of a connection. No call blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._received = bytearray()

    def fileno(self) -> int:
        """File descriptor, to poll for reading."""
        return self._socket.fileno()

    @property
    def handle(self) -> int:
        """What to poll for reading."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether messages wait for flush()."""
        return bool(self._unsent)

    def peer_pid(self) -> int | None:
        """The process that made the pair of sockets, which is the one that has connected to a door of ours; None where
        the kernel does not say."""
        if sys.platform != "linux":
            return None
        pid, _, _ = CREDENTIALS.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        return int(pid) or None  # 0: of another pid namespace

    def send(self, message: bytes) -> None:
        """Send as much as the kernel accepts, and queue the rest for flush(). Raises ConnectionClosed."""
        if self._unsent_bytes > UNSENT_BYTES:
            raise ConnectionClosed("it does not read its messages")
        self._unsent.append(memoryview(LENGTH.pack(len(message)) + message))
        self._unsent_bytes += LENGTH.size + len(message)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send queued messages as far as the kernel accepts them. Raises ConnectionClosed."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosed(error.strerror) from error
            self._unsent_bytes -= sent
            rest = self._unsent.popleft()[sent:]
            if rest:
                self._unsent.appendleft(rest)

    def receive(self) -> list[bytes]:
        """Read once; returns the messages that are complete. Raises ConnectionClosed, after the last message only."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionClosed(error.strerror) from error
        if not data:
            raise ConnectionClosed("it has closed the connection")
        self._received += data
        messages: list[bytes] = []
        start, end = 0, len(self._received)
        while start + LENGTH.size <= end:
            (length,) = LENGTH.unpack_from(self._received, start)
            if start + LENGTH.size + length > end:
                break
            start += LENGTH.size
            messages.append(bytes(self._received[start : start + length]))
            start += length
        del self._received[:start]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
