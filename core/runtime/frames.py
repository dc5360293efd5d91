"""Length-prefixed messages over a Unix socket, between two processes of a server: [length, 4 bytes][message].

There is no I/O thread, so a message costs one wake-up of the receiving process; a ZMQ socket costs three, which are
most of the time of a short request on an idle server.
"""

import socket
import struct
import sys
import time
from collections import deque

UNIX = "unix://"  # scheme of endpoints, before the path of the socket
LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # process, user, group
READ_BYTES = 1 << 18  # read per pass, so that one connection cannot starve the others of a loop
CONNECT_TIMEOUT_S = 30.0
RETRY_S = 0.01
UNSENT_WAIT_S = 0.002  # until a loop calls flush() again, when the socket's buffer was full
UNSENT_BYTES = 256 << 20  # limit of the send queue; reaching it means that the other process hangs


class ConnectionClosed(Exception):
    """The other end has closed the connection, does not read, or does not exist."""


def connect(path: str, timeout_s: float = CONNECT_TIMEOUT_S) -> "FrameSocket":
    """Connect to a listening socket, which may take timeout_s seconds to appear. Raises ConnectionClosed."""
    end = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return FrameSocket(connection)
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise ConnectionClosed(f"no process listens at {path}: {error.strerror}") from error
            time.sleep(RETRY_S)


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
        """The process that has connected to a listening socket of ours; None where the kernel does not say.

        Of a socket pair it is the process that made the pair.
        """
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
