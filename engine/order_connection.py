"""A stage's connection to the scheduler: a pair of sockets on the same machine, a ZMQ DEALER from another one."""

from typing import Any, Protocol

import zmq

from headrace.core.runtime.frames import DOOR, connect, opened

MESSAGES_PER_PASS = 256  # received in one call, so that other sockets get their turn


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
