"""The scheduler's end of the connections to its stages: to those of this machine over Unix sockets, to those of other
machines over a ZMQ ROUTER. Either way a stage has a name, and the two are alike to the StageChannel."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from headrace.core.runtime.frames import ConnectionClosed, FrameSocket
from headrace.core.types.errors import ConfigError

BATCH = 256  # messages taken in one pass, so that one busy channel cannot starve the others
MAX_EVENT_BYTES = 64 << 20  # a plan's prompt logprobs are the largest
HIGH_WATER = 100_000  # both ends are ours and bounded by credits; reaching this means the other end is dead
BACKLOG = 128


class Router(Protocol):
    """Messages from and to named connections. Nothing here blocks."""

    @property
    def unsent(self) -> bool:
        """Whether flush() has something to do."""
        ...

    def sockets(self) -> Sequence[Any]:
        """To poll for reading; others whenever stages come and go."""
        ...

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Names, and the frames of a message each, in a bounded pass."""
        ...

    def send(self, name: bytes, frame: bytes) -> None:
        """Raises ConnectionClosed when there is no such connection, or it takes nothing."""
        ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class FrameRouter:
    """Listens at a path. The first frame of a connection is its name; who comes later takes over the name."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._strangers: list[FrameSocket] = []
        self._named: dict[bytes, FrameSocket] = {}

    @property
    def unsent(self) -> bool:
        return any(connection.unsent for connection in self._named.values())

    def sockets(self) -> Sequence[int]:
        return [self._listener.fileno(), *(each.fileno() for each in (*self._strangers, *self._named.values()))]

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        with suppress(BlockingIOError):
            self._strangers.append(FrameSocket(self._listener.accept()[0]))
        for connection in list(self._strangers):
            try:
                frames = connection.receive()
            except ConnectionClosed:
                self._strangers.remove(connection)
                connection.close()
                continue
            if frames:
                self._strangers.remove(connection)
                name, *more = frames
                if (before := self._named.pop(name, None)) is not None:
                    before.close()
                self._named[name] = connection
                yield from ((name, [frame]) for frame in more)
        for name, connection in list(self._named.items()):
            try:
                yield from ((name, [frame]) for frame in connection.receive())
            except ConnectionClosed:
                self._named.pop(name).close()

    def send(self, name: bytes, frame: bytes) -> None:
        if name not in self._named:
            raise ConnectionClosed("it is not connected")
        self._named[name].send(frame)

    def flush(self) -> None:
        for connection in self._named.values():
            with suppress(ConnectionClosed):  # receive() finds out
                connection.flush()

    def close(self) -> None:
        self.flush()
        for connection in (*self._strangers, *self._named.values()):
            connection.close()
        self._listener.close()


class ZmqRouter:
    """Over a socket from order_socket()."""

    unsent = False  # libzmq sees to it

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return (self._socket,)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        for _ in range(BATCH):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield name, frames

    def send(self, name: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((name, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionClosed(error.strerror) from error

    def flush(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        self._socket.close()


def order_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, silence_s: float = 0.0
) -> "zmq.Socket[bytes]":
    """A ROUTER that stages send to, bound. silence_s: have libzmq itself drop connections whose other end is silent;
    where that may be on another machine, nothing else tells. Raises ConfigError when the address is taken or not ours.
    """
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(HIGH_WATER)
    socket.linger = 1000
    socket.router_mandatory = True
    socket.router_handover = True  # a restarted stage takes its predecessor's place
    socket.ipv6 = True
    if silence_s:
        socket.maxmsgsize = MAX_EVENT_BYTES
        socket.heartbeat_ivl = max(1, int(silence_s * 1000 / 3))
        socket.heartbeat_timeout = max(1, int(silence_s * 1000))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"cannot listen on {endpoint}: {error.strerror}; write another --stage-host or --stage-port"
        ) from error
    return socket


def bound_port(socket: "zmq.Socket[bytes]") -> int:
    """The port that a socket has got."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rstrip("\0").rpartition(":")[2])
