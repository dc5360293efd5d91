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

REFUSALS_PER_S = (
    2.0  # of one connection; a peer that waits for its session to be admitted tries again every second in the end
)
REFUSALS = 32.0
CLOSE_S = 1.0  # from the last refusal until a connection is closed
DEAF_KEPT = 4096  # routes that are not heard any more


class Arrival(NamedTuple):
    """A message, the connection's name and what was said, and the frame that tells where it came from."""

    route: bytes
    body: list[bytes]
    frame: zmq.Frame


class Condemned(NamedTuple):
    """A connection that is to be closed, unless another route turns out to be its own."""

    route: bytes
    connection: Connection
    at: float


class Listener:
    """part: of the server, for logs and counters. port 0 takes a free one. max_frame, queue, unread: as in
    sockets.bind. Raises ConfigError when it cannot bind."""

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
        self._gate = zap.gate(context, config, part)
        self._connections = Connections(context, part, has_session=lambda route: route in self._kept)
        self._kept: dict[bytes, Connection | None] = {}
        self._condemned: dict[int, Condemned] = {}  # by descriptor, the earliest first
        self._deaf: dict[bytes, None] = {}  # routes that are not heard any more, the oldest first
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
            self._unguard()
            raise

    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll for reading."""
        return (self.socket, *self._connections.sockets(), *(self._gate.sockets() if self._gate else ()))

    def receive(self, now: float) -> Iterator[Arrival]:
        """What has come, in a bounded pass, but for what comes from connections that are closed here."""
        self._close_condemned(now)
        failed = self._connections.receive(now)
        if self._gate is not None:
            self._gate.receive(failed, now)
        for _ in range(zmq_sockets.RECEIVE_BATCH):
            frames = zmq_sockets.take_frames(self.socket)
            if frames is None:
                return
            route, *body = (frame.bytes for frame in frames)
            self._connections.note(route, frames[-1])
            if self._condemned:
                self._acquit(route, frames[-1])
            if route not in self._deaf:
                yield Arrival(route, body, frames[-1])

    def next_deadline(self) -> float | None:
        """When receive() is wanted though nothing has come."""
        return next((each.at for each in self._condemned.values()), None)

    def put(self, route: bytes, frame: bytes) -> bool:
        """Say something. False when the connection is gone, or has left too much unread."""
        return zmq_sockets.put(self.socket, (route, frame))

    def put_tracked(self, frames: Sequence[bytes], payload: Sequence[Any]) -> list[zmq.MessageTracker] | None:
        """As sockets.put_tracked; the first of the frames is the route."""
        return zmq_sockets.put_tracked(self.socket, frames, payload)

    def refuse(self, arrival: Arrival, frame: bytes, now: float) -> None:
        """Say why something is refused to a connection without a session, unless it has heard that too often.

        The message may have waited until its own connection was closed, and another one have got its descriptor. That
        one is not to suffer for it: it has time to say something, which shows that the two are not the same."""
        if self._refusals.allowed(arrival.route, now):
            self.put(arrival.route, frame)
            return
        self._stop_hearing(arrival.route)
        connection = self._connections.of(arrival.frame)
        if connection is not None:
            self._condemned.pop(connection.descriptor, None)  # one that has had the descriptor before
            self._condemned[connection.descriptor] = Condemned(arrival.route, connection, now + CLOSE_S)

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
        self._stop_hearing(route)

    def statistics(self) -> tuple[Sample, ...]:
        """Connections, and handshakes that were refused."""
        refused = self._gate.counters.snapshot() if self._gate is not None else ()
        return (*self._connections.statistics(), *refused)

    def close(self, linger_ms: int = 0) -> None:
        """linger_ms: for the last words."""
        self._unguard()
        self.socket.close(linger=linger_ms)

    def _unguard(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._connections.close()

    def _stop_hearing(self, route: bytes) -> None:
        """libzmq gives every connection another name, unless its peer names itself."""
        if len(route) == 5 and route[0] == 0:
            self._deaf[route] = None
            if len(self._deaf) > DEAF_KEPT:
                del self._deaf[next(iter(self._deaf))]

    def _acquit(self, route: bytes, frame: zmq.Frame) -> None:
        connection = self._connections.of(frame)
        condemned = self._condemned.get(connection.descriptor) if connection is not None else None
        if condemned is not None and condemned.route != route:
            del self._condemned[condemned.connection.descriptor]

    def _close_condemned(self, now: float) -> None:
        for descriptor, each in list(self._condemned.items()):
            if each.at > now:
                return
            del self._condemned[descriptor]
            self._connections.close_one(each.connection, REFUSED, now)

    def _prepare(self, socket: Socket) -> None:
        self._connections.watch(socket)
        if self._gate is not None:
            self._gate.guard(socket)
