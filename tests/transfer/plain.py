"""A peer without libzmq: nothing takes in what is not asked for, and nothing connects again."""

import select
import socket as tcp
import struct
from contextlib import suppress

RUBBISH = b"\xc1"  # no msgpack


class Plain:
    """A DEALER in bytes: ZMTP 3.0 without security. It takes in nothing unless it is asked for it."""

    def __init__(self, port: int) -> None:
        self.socket = tcp.socket()
        self.socket.setsockopt(tcp.SOL_SOCKET, tcp.SO_RCVBUF, 4096)
        self.socket.settimeout(5)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)
        ready = b"\x05READY" + properties
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        for size in (64, 2 + len(ready)):  # theirs, of a ROUTER
            self._take(size)
        self.socket.setblocking(False)
        self._unsent = b""

    def say(self, message: bytes, times: int = 1) -> None:
        """As often as kernels take it."""
        head = bytes([0, len(message)]) if len(message) < 256 else b"\x02" + struct.pack(">Q", len(message))
        self._unsent = self._unsent or (head + message) * times
        with suppress(BlockingIOError, ConnectionError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def take(self) -> bytes:
        """The next frame."""
        self.socket.settimeout(5)
        flags, size = self._take(1)[0], self._take(1)
        if flags & 2:
            size += self._take(7)
        frame = self._take(int.from_bytes(size, "big"))
        self.socket.setblocking(False)
        return frame

    @property
    def closed(self) -> bool:
        """Whether the other end has closed the connection."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def heard(self) -> bytes:
        """What has come, up to the end of the connection."""
        self.socket.settimeout(5)
        found = b""
        with suppress(ConnectionError):
            while more := self.socket.recv(1 << 16):
                found += more
        return found

    def reset(self) -> None:
        """End as a process does that has not read everything."""
        self.socket.setsockopt(tcp.SOL_SOCKET, tcp.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _take(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            if not (more := self.socket.recv(size - len(found))):
                raise ConnectionError(f"the other end has closed the connection: {size - len(found)} bytes are missing")
            found += more
        return found
