"""The scheduler's connections to its stages, addressed by routing id: through a door to local stages, over a ZMQ
ROUTER to external ones."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from select import POLLIN, poll
from typing import Any, Protocol

import zmq

from headrace.core.runtime.frames import ConnectionClosed, FrameSocket, admit
from headrace.core.runtime.process import SHORTAGES
from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Sample
from headrace.core.types.errors import ConfigError
from headrace.transfer.sockets.connections import Connections

log = logging.getLogger(__name__)

BATCH = 256  # messages received per pass, so that a busy socket cannot starve the others
MAX_EVENT_BYTES = 64 << 20  # a plan's prompt logprobs are the largest
HIGH_WATER = 100_000  # messages are bounded by credits; reaching this means the other end is dead
UNREAD = 1000  # received messages of one connection; further ones wait in TCP
ACCEPT_PAUSE_S = 0.1  # after no connection could be accepted for want of descriptors or memory


class StageRouter(Protocol):
    """Sends and receives messages over connections that have routing ids ("names"). No call blocks."""

    @property
    def unsent(self) -> bool:
        """Whether messages wait for flush()."""
        ...

    def sockets(self) -> Sequence[Any]:
        """What to poll for reading; changes as stages connect and disconnect."""
        ...

    def next_deadline(self) -> float | None:
        """When flush() is due even if nothing is unsent; None for no such time."""
        ...

    def receive(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yields the routing id and the frames of each message, of a bounded number of them."""
        ...

    def send(self, name: bytes, frame: bytes) -> None:
        """Send a message. Raises ConnectionClosed when there is no such connection, or its buffers are full."""
        ...

    def pid(self, name: bytes) -> int | None:
        """The process at the other end, if it is on this machine."""
        ...

    def flush(self, now: float) -> None:
        """Send queued messages as far as the sockets accept them."""
        ...

    def statistics(self) -> tuple[Sample, ...]:
        """Connections and failures to accept one."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class FrameRouter:
    """A Router over connections that come through a door (core/runtime/frames.py), whose inner end it takes over.

    The first frame of a connection is its routing id. A later connection with the same id replaces the earlier one.
    When no descriptor is free, new connections wait in the kernel, and are admitted after a pause.
    """

    def __init__(self, door: socket.socket) -> None:
        door.setblocking(False)
        self._door = door
        self._incoming = poll()
        self._incoming.register(door, POLLIN)
        self._accept_again: float | None = None
        self._log_throttle = LogThrottle()
        self._counters = Counters()
        self._unnamed: list[FrameSocket] = []
        self._named: dict[bytes, FrameSocket] = {}

    @property
    def unsent(self) -> bool:
        """Whether a connection has messages to flush."""
        return any(connection.unsent for connection in self._named.values())

    def sockets(self) -> Sequence[int]:
        """The door, unless it is left alone for a while, and all connections."""
        door = [self._door.fileno()] if self._accept_again is None else []
        return [*door, *(each.fileno() for each in (*self._unnamed, *self._named.values()))]

    def next_deadline(self) -> float | None:
        """When the door is looked at again."""
        return self._accept_again

    def receive(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Admit a connection, and read once from each."""
        self._accept(now)
        for connection in list(self._unnamed):
            try:
                frames = connection.receive()
            except ConnectionClosed:
                self._unnamed.remove(connection)
                connection.close()
                continue
            if frames:
                self._unnamed.remove(connection)
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
        """Send, or queue what the kernel does not accept. Raises ConnectionClosed."""
        if name not in self._named:
            raise ConnectionClosed("it is not connected")
        self._named[name].send(frame)

    def pid(self, name: bytes) -> int | None:
        """As the kernel tells it (Linux)."""
        return self._named[name].peer_pid() if name in self._named else None

    def flush(self, now: float) -> None:
        """Send queued messages as far as the kernel accepts them, and look at the door again when that is due."""
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
        self._flush()

    def statistics(self) -> tuple[Sample, ...]:
        """Failures to admit a connection."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Flush and close all connections."""
        self._flush()
        for connection in (*self._unnamed, *self._named.values()):
            connection.close()
        self._door.close()

    def _accept(self, now: float) -> None:
        """Admit one connection, if one is waiting: without free descriptors that fails even when none is."""
        if self._accept_again is not None or not self._incoming.poll(0):
            return
        try:
            self._unnamed.append(admit(self._door))
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            self._accept_again = now + ACCEPT_PAUSE_S
            self._counters.add("accept_failures_total", labels=("stages",))
            if self._log_throttle.due("accept", now):
                log.warning("cannot accept the connection of a stage, trying again: %s", error.strerror)

    def _flush(self) -> None:
        for connection in self._named.values():
            with suppress(ConnectionClosed):  # receive() finds out
                connection.flush()


class ZmqRouter:
    """A Router over a socket from order_socket(), and the connections that are watched there."""

    unsent = False  # libzmq queues messages

    def __init__(self, socket: "zmq.Socket[bytes]", connections: Connections) -> None:
        self._socket = socket
        self._connections = connections

    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """The ROUTER and its monitor."""
        return (self._socket, *self._connections.sockets())

    def next_deadline(self) -> float | None:
        """None: libzmq sends by itself."""
        return None

    def receive(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yields BATCH messages at most."""
        self._connections.receive(now)
        for _ in range(BATCH):
            message = self._connections.take()
            if message is None:
                return
            name, *frames = message
            yield name, frames

    def send(self, name: bytes, frame: bytes) -> None:
        """Hand a message to libzmq. Raises ConnectionClosed."""
        try:
            self._socket.send_multipart((name, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionClosed(error.strerror) from error

    def pid(self, name: bytes) -> int | None:
        """None: it is on another machine."""
        return None

    def flush(self, now: float) -> None:
        """Nothing to do: libzmq queues messages."""

    def statistics(self) -> tuple[Sample, ...]:
        """Counters and gauges for /metrics."""
        return self._connections.statistics()

    def close(self) -> None:
        """Close the ROUTER."""
        self._connections.close()
        self._socket.close()


def order_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    watch: Callable[["zmq.Socket[bytes]"], None],
    silence_s: float = 0.0,
) -> "zmq.Socket[bytes]":
    """Bind the ROUTER that stages connect to.

    Raises ConfigError when the address is in use or not one of this machine.

    Args:
        watch: bounds its connections, see transfer/sockets/connections.py.
        silence_s: the kernel closes connections whose other machine is silent for this long. Until a stage is up
            nothing else shows that its machine is gone. 0: never.
    """
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm, socket.rcvhwm = HIGH_WATER, UNREAD
    socket.linger = 1000
    socket.router_mandatory = True
    socket.router_handover = True  # a restarted stage replaces its predecessor's connection
    socket.ipv6 = True
    if silence_s:
        socket.maxmsgsize = MAX_EVENT_BYTES
        # Not ZMTP heartbeats: see transfer/sockets/zmq_sockets.py.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = max(1, int(silence_s / 3))
        socket.tcp_keepalive_cnt = 3
        socket.tcp_maxrt = max(1, int(silence_s * 1000))  # the same while something is sent there
    watch(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"cannot listen on {endpoint}: {error.strerror}; write another --stage-host or --stage-port"
        ) from error
    return socket


def bound_port(socket: "zmq.Socket[bytes]") -> int:
    """The TCP port that a socket is bound to."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rstrip("\0").rpartition(":")[2])
