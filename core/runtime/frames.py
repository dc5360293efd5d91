"""Whole messages between two processes of a server, over a Unix socket: [length, 4 bytes][message], in order.

No thread stands between the two, so a message costs one wake-up of the other process; through a ZMQ socket it would
cost three, which an idle server spends most of a short request's time on.
"""

import socket
import struct
import time
from collections import deque

UNIX = "unix://"  # before the path where a connection is to be had
LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18  # taken in one pass, so that other work of a loop gets its turn
CONNECT_TIMEOUT_S = 30.0
RETRY_S = 0.01
UNSENT_WAIT_S = 0.002  # until a loop offers again what the other end had no room for
UNSENT_BYTES = 256 << 20  # both ends are ours; reaching this means that the other one is dead


class OtherEndGone(Exception):
    """Nothing comes or goes any more."""


def connect(path: str, timeout_s: float = CONNECT_TIMEOUT_S) -> "FrameSocket":
    """A connection to whoever listens at the path, or will within this time. Raises OtherEndGone."""
    end = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return FrameSocket(connection)
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise OtherEndGone(f"nobody listens at {path}: {error.strerror}") from error
            time.sleep(RETRY_S)


class FrameSocket:
    """One end of a connection. Nothing here blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def handle(self) -> int:
        """To poll for reading."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether flush() has something to do."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send what the kernel takes now, and keep the rest for flush(). Raises OtherEndGone."""
        if self._unsent_bytes > UNSENT_BYTES:
            raise OtherEndGone("it does not take messages")
        self._unsent.append(memoryview(LENGTH.pack(len(message)) + message))
        self._unsent_bytes += LENGTH.size + len(message)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Go on with what was kept. Raises OtherEndGone."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise OtherEndGone(error.strerror) from error
            self._unsent_bytes -= sent
            rest = self._unsent.popleft()[sent:]
            if rest:
                self._unsent.appendleft(rest)

    def receive(self) -> list[bytes]:
        """The messages that are complete after one pass. Raises OtherEndGone, but not before the last was given."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise OtherEndGone(error.strerror) from error
        if not data:
            raise OtherEndGone("it has closed the connection")
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
        self._socket.close()
