"""A bound ROUTER with the limits that a server needs towards the peers that connect to it.

CURVE decides which peers may connect (transfer/sockets/zap.py). Messages of a connection without a session that goes on
with what is refused are dropped, and the connection is closed a little later, so that it leaves few messages unread.
The owner closes other connections by their route.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from headrace.core.config import TransferConfig
from headrace.core.runtime.rate_limit import RateLimits
from headrace.core.stats import Sample
from headrace.core.types.errors import ConfigError
from headrace.transfer.sockets import zap, zmq_sockets
from headrace.transfer.sockets.connections import REFUSED, Connection, Connections
from headrace.transfer.sockets.zmq_sockets import Context, Socket

# Per connection. A peer that waits for its session to be admitted tries again, every second in the end.
REFUSALS_PER_S = 2.0
REFUSALS = 32.0  # at once
NO_SESSION_S = 60.0  # from accept() until a connection without a session is closed; an honest peer has one at once
CLOSE_S = 1.0  # from the last refusal until a connection is closed
IGNORED_KEPT = 4096  # routes whose messages are dropped


class Arrival(NamedTuple):
    """A received message."""

    route: bytes
    """ZMQ routing id of its connection."""
    body: list[bytes]
    """Its frames without the routing id."""
    frame: zmq.Frame
    """Its last frame, from which libzmq knows the connection."""


class PendingClose(NamedTuple):
    """A connection that will be closed, unless it turns out to be that of another route."""

    route: bytes
    """Routing id of the connection that was refused too often."""
    connection: Connection
    at: float
    """When it will be closed, seconds."""


class Listener:
    """A bound ROUTER with its connections and, where the server has CURVE keys, its authenticator.

    Args:
        part: name of the socket in logs and metrics.
        port: 0 takes a free one.
        max_frame, queue, unread: as in zmq_sockets.bind().

    Attributes:
        socket: the ROUTER.
        port: TCP port that it is bound to.

    Raises ConfigError when it cannot bind, or a CURVE key cannot be used.
    """

    def __init__(
        self,
        config: TransferConfig,
        context: Context,
        part: str,
        *,
        port: int,
        max_frame: int,
        queue: int,
        unread: int,
    ) -> None:
        keys = zap.own_keys(config)  # None: connections are in the clear
        self._authenticator = zap.ZapAuthenticator(context, keys, config.curve_allowed, part) if keys else None
        self._connections = Connections(
            context, part, has_session=lambda route: route in self._kept, max_age_s=NO_SESSION_S
        )
        self._kept: dict[bytes, Connection | None] = {}  # by route, connections with a session
        self._closing: dict[int, PendingClose] = {}  # by descriptor, the earliest first
        self._ignored: dict[bytes, None] = {}  # routes whose messages are dropped, the oldest first
        self._refusals = RateLimits(REFUSALS_PER_S, REFUSALS)
        try:
            self.socket, self.port = zmq_sockets.bind(
                context,
                config.host,
                port,
                max_frame=max_frame,
                queue=queue,
                unread=unread,
                silence_s=config.peer_timeout_s,
                prepare=self._prepare,
            )
        except ConfigError:
            self._close_helpers()
            raise

    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll for reading."""
        return (
            self.socket,
            *self._connections.sockets(),
            *(self._authenticator.sockets() if self._authenticator else ()),
        )

    def receive(self, now: float) -> Iterator[Arrival]:
        """The messages that have come, in a bounded pass, without those of connections that are being closed."""
        self._close_due(now)
        failed = self._connections.receive(now)
        if self._authenticator is not None:
            self._authenticator.receive(failed, now)
        for _ in range(zmq_sockets.RECEIVE_BATCH):
            frames = zmq_sockets.take_frames(self.socket)
            if frames is None:
                return
            route, *body = (frame.bytes for frame in frames)
            self._connections.note(route, frames[-1])
            if self._closing:
                self._keep_open(route, frames[-1])
            if route not in self._ignored:
                yield Arrival(route, body, frames[-1])

    def next_deadline(self) -> float | None:
        """When receive() has to be called although nothing has come."""
        closing = next((each.at for each in self._closing.values()), None)
        return min((at for at in (closing, self._connections.next_deadline()) if at is not None), default=None)

    def sender(self, arrival: Arrival) -> tuple[str, str]:
        """The name of the CURVE public key, and the host, of a message's connection; "" for what is not known."""
        return _property(arrival.frame, "User-Id"), _property(arrival.frame, "Peer-Address")

    def put(self, route: bytes, frame: bytes) -> bool:
        """Send a message of one frame. False when the connection is gone, or has left too much unread."""
        return zmq_sockets.put(self.socket, (route, frame))

    def put_tracked(self, frames: Sequence[bytes], payload: Sequence[Any]) -> list[zmq.MessageTracker] | None:
        """As zmq_sockets.put_tracked(); the first of the frames is the route."""
        return zmq_sockets.put_tracked(self.socket, frames, payload)

    def refuse(self, arrival: Arrival, frame: bytes, now: float) -> None:
        """Send a refusal to a connection without a session; ignore and close one that was refused too often.

        The message may have waited until its own connection was closed and another one has got its descriptor. That
        one must not be closed, so there is a delay: a message on it shows that its route is another.
        """
        if self._refusals.allowed(arrival.route, now):
            self.put(arrival.route, frame)
            return
        self._ignore(arrival.route)
        connection = self._connections.of(arrival.frame)
        if connection is not None:
            self._closing.pop(connection.descriptor, None)  # an earlier connection with this descriptor
            self._closing[connection.descriptor] = PendingClose(arrival.route, connection, now + CLOSE_S)

    @property
    def kept(self) -> Collection[bytes]:
        """Routes whose connections can be dropped."""
        return self._kept.keys()

    def keep(self, arrival: Arrival) -> None:
        """Remember the connection that a message came through, until it is dropped."""
        if arrival.route not in self._kept:
            self._kept[arrival.route] = self._connections.of(arrival.frame)

    def drop(self, route: bytes, reason: str, now: float) -> None:
        """Close a connection that was kept, with all that is queued on it."""
        self._connections.close_one(self._kept.pop(route, None), reason, now)
        self._ignore(route)

    def statistics(self) -> tuple[Sample, ...]:
        """Connections, and handshakes that were refused."""
        refused = self._authenticator.counters.snapshot() if self._authenticator is not None else ()
        return (*self._connections.statistics(), *refused)

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets. linger_ms: time for libzmq to send what is queued."""
        self._close_helpers()
        self.socket.close(linger=linger_ms)

    def _close_helpers(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self._connections.close()

    def _ignore(self, route: bytes) -> None:
        """Drop the messages of a connection from now on.

        Only where libzmq made up the routing id (5 bytes, the first 0): it never uses one again, a peer may.
        """
        if len(route) == 5 and route[0] == 0:
            self._ignored[route] = None
            if len(self._ignored) > IGNORED_KEPT:
                del self._ignored[next(iter(self._ignored))]

    def _keep_open(self, route: bytes, frame: zmq.Frame) -> None:
        """Do not close the connection of this message, if it was to be closed for another route's refusals."""
        connection = self._connections.of(frame)
        pending = self._closing.get(connection.descriptor) if connection is not None else None
        if pending is not None and pending.route != route:
            del self._closing[pending.connection.descriptor]

    def _close_due(self, now: float) -> None:
        for descriptor, each in list(self._closing.items()):
            if each.at > now:
                return
            del self._closing[descriptor]
            self._connections.close_one(each.connection, REFUSED, now)

    def _prepare(self, socket: Socket) -> None:
        self._connections.watch(socket)
        if self._authenticator is not None:
            self._authenticator.guard(socket)


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:  # there is none: the connection is in the clear, or closed
        return ""
