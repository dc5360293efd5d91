"""The TCP connections of a bound ZMQ socket: limits their number, and closes single ones.

    a message ──ZMQ_SRCFD──► descriptor ──► Connection ──close_one()──► shutdown(descriptor)
    a monitor ──ACCEPTED, DISCONNECTED──► which descriptors libzmq has open ──too many──► close_one(the oldest one
                                                                                          without a session)
    the time since ACCEPTED ──too long without a session──► close_one()

libzmq has no call that closes one connection of a socket. What is queued for it, and the memory that zero-copy frames
refer to, is held for as long as the other end keeps the connection open, whether or not it reads. Shutting the
descriptor down has libzmq drop the connection with all that is queued, as if the other end had closed it.

libzmq accepts every connection and has no limit of its own. Connections that send nothing could therefore take all
descriptors of the process: accept() then fails without a pause, and no file, pipe or internal connection can be opened.
New connections are always accepted, since a legitimate peer has no session at first.
"""

import logging
import os
import socket as tcp
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

import zmq

from headrace.core.runtime.process import max_sessionless
from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Sample
from headrace.transfer.sockets.zmq_sockets import Context, Socket, take, take_frames

log = logging.getLogger(__name__)

# Reasons of connections_closed_total
ENDED = "ended"  # its session has ended; the only reason that is not logged
NO_SESSION = "no_session"  # it has opened none for so long
REFUSED = "refused"  # it goes on sending what is refused
SHED = "shed"  # there are too many without a session, and it is the oldest
UNREAD = "unread"  # it does not read what is sent to it
WHY = {
    NO_SESSION: "it has been open for long and has no session",
    REFUSED: "it goes on sending what is refused",
    SHED: "too many are open without a session, and it was the oldest",
    UNREAD: "it does not read what is sent to it",
}

HANDSHAKE_MS = 10_000  # from accept() to the end of the ZMTP handshake

EVENT = struct.Struct("=HI")  # number and value, as libzmq's monitors send them
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the kernel drops what it holds, too


class Connection(NamedTuple):
    """One connection that a socket has accepted."""

    descriptor: int
    """File descriptor."""
    number: int
    """Counts the connections that were accepted: descriptors are used again."""

    host: str
    """Of the other end, for logs; "" if it has sent nothing."""


class Connections:
    """The connections of one socket, used in the thread that owns it. Closed ones are counted and logged, rate-limited.

    Args:
        part: name of the socket in logs and metrics.
        limit: of open connections without a session; by default what the process can afford.
        has_session: whether the connection with this route has a session, and is not closed for the limits.
        max_age_s: after which a connection without a session is closed; None: never.
    """

    def __init__(
        self,
        context: Context,
        part: str,
        limit: int | None = None,
        *,
        has_session: Callable[[bytes], bool] = lambda _route: False,
        max_age_s: float | None = None,
    ) -> None:
        self._part = part
        self._limit = max_sessionless() if limit is None else limit
        self._has_session = has_session
        self._max_age_s = max_age_s
        self._counters = Counters()
        self._counters.add("connections_closed_total", 0, (part, SHED))
        self._log_throttle = LogThrottle()
        self._events = context.socket(zmq.PAIR)
        # Without a limit: libzmq's own threads wait where one is reached, and events are small and bring nothing in.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._watched: Socket | None = None
        self._open: dict[int, int] = {}  # by descriptor, the number of the connection; the oldest first
        self._routes: dict[int, bytes] = {}  # by descriptor, the route of its messages, once one has come
        self._young: dict[int, float] = {}  # by descriptor, when its age is looked at; the oldest first
        self._now = 0.0  # of the last receive()
        self._accepted = 0
        self._counted = 0  # of the accepted, those that the limit has been applied to
        self._failed: list[int] = []  # handshakes that failed and were not asked for yet: what libzmq says of each

    def watch(self, socket: Socket) -> None:
        """Watch a socket that is about to be bound."""
        # Without EVENT_ACCEPT_FAILED: when descriptors run out libzmq sends it in a busy loop.
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # A name that no other monitor has had: libzmq frees that of a closed one some time after close().
        endpoint = f"inproc://connections-{uuid4().hex}"
        socket.monitor(endpoint, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._events.connect(endpoint)
        self._watched = socket

    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll for reading."""
        return (self._events,)

    def receive(self, now: float) -> list[int]:
        """Read the monitor's events, and close connections above the limits. Call it before the socket is read.

        Returns the protocol errors of handshakes that have failed.
        """
        self._now = now
        self._learn()
        while self._accepted > self._counted:  # closing one reads events of further ones
            self._counted = self._accepted
            if len(self._open) > self._limit:
                self._shed(now)
        self._close_old(now)
        failed, self._failed = self._failed, []
        return failed

    def next_deadline(self) -> float | None:
        """When receive() has to be called although nothing has come: at once where a message was looked up among the
        connections, which reads the events of new ones."""
        return self._now if self._accepted > self._counted else next(iter(self._young.values()), None)

    def take(self) -> list[bytes] | None:
        """The next message of the watched ROUTER, its route first; None when there is none."""
        assert self._watched is not None
        frames = take_frames(self._watched)
        if frames is None:
            return None
        self.note(frames[0].bytes, frames[-1])
        return [frame.bytes for frame in frames]

    def note(self, route: bytes, frame: zmq.Frame) -> None:
        """Remember the route of a message's connection, for has_session. frame: one of the message's frames."""
        with suppress(zmq.ZMQError):  # libzmq knows no descriptor for inproc, nor where the peer was gone at accept()
            descriptor = int(frame.get(zmq.SRCFD))
            if descriptor not in self._open:  # it was accepted after receive()
                self._learn()
            if descriptor in self._open:
                self._routes[descriptor] = route

    def of(self, frame: zmq.Frame) -> Connection | None:
        """The connection that a frame came through; None if it is closed, or libzmq does not know.

        A frame that waited until its connection was closed may be taken for one of a connection that was accepted
        since and got the same descriptor.
        """
        self._learn()
        try:
            descriptor, host = int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return None
        number = self._open.get(descriptor)
        return None if number is None else Connection(descriptor, number, host)

    def close_one(self, connection: Connection | None, reason: str, now: float) -> None:
        """Close a connection, unless it is closed already (None), and have libzmq drop what is queued on it: soon, and
        without waiting for the other end."""
        if connection is None or not self._shut(connection):
            return
        self._counters.add("connections_closed_total", labels=(self._part, reason))
        if reason in WHY and self._log_throttle.due(reason, now):
            host = f" of {connection.host}" if connection.host else ""
            log.warning("closed a connection%s to the %s socket: %s", host, self._part, WHY[reason])

    def statistics(self) -> tuple[Sample, ...]:
        """Open connections, and those that were closed here."""
        return (Sample("connections", len(self._open), (self._part,)), *self._counters.snapshot())

    def close(self) -> None:
        """Close the monitor. Call it before the watched socket is closed."""
        if self._watched is not None and not self._watched.closed:
            self._watched.disable_monitor()
        self._events.close()

    def _shed(self, now: float) -> None:
        idle = [each for each in self._open if not self._joined(each)]
        for descriptor in idle[: max(0, len(idle) - self._limit)]:
            self._close(descriptor, SHED, now)

    def _close_old(self, now: float) -> None:
        """A connection that has a session by then is left to the owner, which closes it when the session ends."""
        while self._young:
            descriptor, at = next(iter(self._young.items()))
            if at > now:
                return
            del self._young[descriptor]
            if not self._joined(descriptor):
                self._close(descriptor, NO_SESSION, now)

    def _joined(self, descriptor: int) -> bool:
        return descriptor in self._routes and self._has_session(self._routes[descriptor])

    def _close(self, descriptor: int, reason: str, now: float) -> None:
        number = self._open.get(descriptor)
        if number is not None:
            self.close_one(Connection(descriptor, number, ""), reason, now)

    def _shut(self, connection: Connection) -> bool:
        """False if it was closed before."""
        try:
            held = os.dup(connection.descriptor)
        except OSError:  # closed; or no descriptor is left, and this one has to do
            held = -1
        # If the connection is not closed now, the copy is of it: libzmq says DISCONNECTED before it lets go.
        self._learn()
        still_open = self._open.get(connection.descriptor) == connection.number
        if still_open:
            self._forget(connection.descriptor)
            _reset(held if held >= 0 else connection.descriptor)
        if held >= 0:
            os.close(held)
        return still_open

    def _learn(self) -> None:
        while (event := take(self._events)) is not None:
            kind, value = EVENT.unpack(event[0])
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._forget(value)  # not every end of a connection is reported
                self._open[value] = self._accepted
                if self._max_age_s is not None:
                    self._young[value] = self._now + self._max_age_s
            elif kind == zmq.EVENT_DISCONNECTED:
                self._forget(value)
            else:
                self._failed.append(value)

    def _forget(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self._young.pop(descriptor, None)
        self._routes.pop(descriptor, None)


def _reset(descriptor: int) -> None:
    """Shut a TCP connection down; the descriptor stays the caller's."""
    with suppress(OSError):  # the other end was faster
        connection = tcp.socket(fileno=descriptor)
        try:
            connection.setsockopt(tcp.SOL_SOCKET, tcp.SO_LINGER, RESET)
            connection.shutdown(tcp.SHUT_RDWR)
        finally:
            connection.detach()
