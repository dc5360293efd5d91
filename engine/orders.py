"""A stage's orders: the connection to the scheduler that they come over, and the check that they are those it sent.

The connection is a pair of sockets on the same machine, a ZMQ DEALER from another one.

Two streams are counted and hashed (core/runtime/codec.py): the orders to this rank's replica, and what all replicas
agreed on for each pass. A Heartbeat carries the scheduler's counts and digests of both.
"""

import queue
from typing import Any, Protocol

import msgspec
import zmq

from headrace.core.messages.orders import AnyOrder, Forward, Heartbeat, pass_frame
from headrace.core.runtime.codec import OrderLog
from headrace.core.runtime.frames import DOOR, connect, opened
from headrace.engine.collectives.operations import LinkBroken

MESSAGES_PER_PASS = 256  # received in one call, so that other sockets get their turn

Inbox = queue.Queue[AnyOrder | LinkBroken]
"""Orders for the compute thread, and what ends it where another thread has noticed that a link is broken."""


class OrderConnection(Protocol):
    """Sends and receives whole messages, in order. No call blocks."""

    @property
    def unsent(self) -> bool:
        """Whether messages wait for flush()."""
        ...

    @property
    def handle(self) -> Any:
        """Socket or file descriptor to poll for reading."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message, or keep what the socket does not take for flush(). Raises ConnectionClosed."""
        ...

    def flush(self) -> None:
        """Send what is kept, as far as the socket takes it. Raises ConnectionClosed."""
        ...

    def receive(self) -> list[bytes]:
        """Messages that have arrived. Raises ConnectionClosed."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def connect_scheduler(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes) -> OrderConnection:
    """Connect to the scheduler's order socket.

    endpoint: the outer end of a door (core/runtime/frames.py) or a ZMQ endpoint. identity: routing id of the stage
    (stage_identity). Raises ConnectionClosed.
    """
    if endpoint.startswith(DOOR):
        with opened(endpoint) as door:
            control = connect(door)
        control.send(identity)
        return control
    return ZmqOrderConnection(context, endpoint, identity)


class ZmqOrderConnection:
    """An OrderConnection over a ZMQ DEALER socket."""

    unsent = False  # libzmq queues and sends

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes) -> None:
        """Connect; identity: the routing id."""
        self.handle = context.socket(zmq.DEALER)
        self.handle.routing_id = identity
        self.handle.set_hwm(0)
        self.handle.ipv6 = True
        # Never reconnect: messages on a broken connection are lost, and a stage that missed an order must not go on.
        self.handle.reconnect_ivl = -1
        self.handle.linger = 1000
        self.handle.connect(endpoint)

    def send(self, message: bytes) -> None:
        """Queue a message; libzmq sends it."""
        self.handle.send(message)

    def flush(self) -> None:
        """Does nothing: libzmq sends what is queued."""

    def receive(self) -> list[bytes]:
        """Up to MESSAGES_PER_PASS messages that have arrived."""
        messages: list[bytes] = []
        while len(messages) < MESSAGES_PER_PASS:
            try:
                messages.append(self.handle.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Close the socket; queued messages get a second to leave."""
        self.handle.close()


class OrderMismatch(Exception):
    """The orders that this rank received are not those that the scheduler sent, or contradict each other."""


class OrderCheck:
    """Checks that a rank's orders are those that the scheduler sent, and its passes those of the other replicas."""

    def __init__(self, replica: int) -> None:
        """replica: data-parallel replica of the rank."""
        self._replica = replica
        self._orders = OrderLog()
        self._passes = OrderLog()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def count(self) -> int:
        """Orders so far."""
        return self._orders.count

    def add(self, frame: bytes, order: AnyOrder) -> None:
        """Add the next order, with its encoding. Raises OrderMismatch for a pass whose rows are not those that all
        replicas count on: it must not be computed."""
        self._orders.add(frame)
        if isinstance(order, Forward) and order.agreement is not None:
            self._passes.add(pass_frame(order))
            agreed, tokens = order.agreement.tokens, sum(row.count for row in order.rows)
            if not self._replica < len(agreed) or agreed[self._replica] != tokens:
                raise OrderMismatch(
                    f"order {order.seq} has {tokens} tokens of replica {self._replica}; agreed are {agreed}"
                )

    def check(self, heartbeat: Heartbeat) -> None:
        """Compare with what the scheduler has sent. Raises OrderMismatch."""
        sent = (heartbeat.orders, heartbeat.digest)
        if (self._orders.count, self._orders.digest) != sent:
            raise OrderMismatch(f"the stage's orders are not the scheduler's: {_texts(self._orders, sent)}")
        sent = (heartbeat.passes, heartbeat.pass_digest)
        if (self._passes.count, self._passes.digest if self._passes.count else b"") != sent:
            raise OrderMismatch(f"the stage's passes are not those of all replicas: {_texts(self._passes, sent)}")


def _texts(log: OrderLog, sent: tuple[int, bytes]) -> str:
    return f"{log.count} ({log.digest.hex()}) received, {sent[0]} ({sent[1].hex()}) sent"
