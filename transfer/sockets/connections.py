"""The TCP connections of a bound socket, and how to close one of them.

    a message ──ZMQ_SRCFD──► descriptor ──► Connection ──close_one()──► shutdown(descriptor)
    a monitor ──ACCEPTED, DISCONNECTED──► which descriptors libzmq has open

libzmq has no call that closes one connection of a socket. What is queued for it, and the memory that zero-copy frames
refer to, is held for as long as the other end keeps the connection open, whether or not it reads. Shutting the
descriptor down has libzmq drop the connection with all that is queued, as if the other end had closed it.
"""

import logging
import os
import socket as tcp
import struct
from contextlib import suppress
from typing import NamedTuple

import zmq

from headrace.core.runtime.log_throttle import LogThrottle
from headrace.core.stats import Counters
from headrace.transfer.sockets.zmq_sockets import Context, Socket, take

log = logging.getLogger(__name__)

ENDED = "ended"  # its session has; the only reason that is not logged
REFUSED = "refused"
UNREAD = "unread"
WHY = {REFUSED: "it goes on with what is refused", UNREAD: "it does not read what it is told"}

EVENT = struct.Struct("=HI")  # number and value, as libzmq's monitors send them
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the kernel drops what it holds, too


class Connection(NamedTuple):
    """One connection that a socket has accepted."""

    descriptor: int
    number: int  # counts the connections that were accepted; descriptors are used again
    host: str  # of the other end, for logs


class Connections:
    """Of one socket, and for the thread that owns it. part: of the server, for logs and counters. What is closed is
    counted, and logged once in a while."""

    def __init__(self, context: Context, part: str) -> None:
        self.counters = Counters()
        self._part = part
        self._quiet = LogThrottle()
        self._events = context.socket(zmq.PAIR)
        # Without a limit: libzmq's own threads wait where one is reached, and events are small and bring nothing in.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._watched: Socket | None = None
        self._open: dict[int, int] = {}  # by descriptor, the number of the connection
        self._accepted = 0
        self._failed: list[int] = []  # handshakes that failed and were not asked for yet: what libzmq says of each

    def watch(self, socket: Socket) -> None:
        """Before it is bound."""
        endpoint = f"inproc://connections-{id(self)}"
        socket.monitor(endpoint, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._events.connect(endpoint)
        self._watched = socket

    def sockets(self) -> tuple[Socket, ...]:
        return (self._events,)

    def receive(self) -> list[int]:
        """Learn what has happened. Returns the protocol errors of handshakes that have failed since."""
        self._learn()
        failed, self._failed = self._failed, []
        return failed

    def of(self, frame: zmq.Frame) -> Connection | None:
        """The connection that a frame came through; None if it is closed, or libzmq does not say.

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
        self.counters.add("connections_closed_total", labels=(self._part, reason))
        if reason in WHY and self._quiet.due(reason, now):
            log.warning("closed a connection of %s to the %s socket: %s", connection.host, self._part, WHY[reason])

    def close(self) -> None:
        """Before the watched socket."""
        if self._watched is not None:
            self._watched.disable_monitor()
        self._events.close()

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
            del self._open[connection.descriptor]
            _reset(held if held >= 0 else connection.descriptor)
        if held >= 0:
            os.close(held)
        return still_open

    def _learn(self) -> None:
        while (event := take(self._events)) is not None:
            kind, value = EVENT.unpack(event[0])
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._open[value] = self._accepted
            elif kind == zmq.EVENT_DISCONNECTED:
                self._open.pop(value, None)
            else:
                self._failed.append(value)


def _reset(descriptor: int) -> None:
    """Shut a TCP connection down; the descriptor stays the caller's."""
    with suppress(OSError):  # the other end was faster
        connection = tcp.socket(fileno=descriptor)
        try:
            connection.setsockopt(tcp.SOL_SOCKET, tcp.SO_LINGER, RESET)
            connection.shutdown(tcp.SHUT_RDWR)
        finally:
            connection.detach()
