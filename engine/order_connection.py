"""The stage's end of the connection to the scheduler: a Unix socket on the same machine, a ZMQ DEALER elsewhere."""

from typing import Any, Protocol

import zmq

from headrace.core.runtime.frames import UNIX, connect

MESSAGES_PER_PASS = 256


class OrderConnection(Protocol):
    """Messages in order, both ways. Nothing here blocks."""

    @property
    def unsent(self) -> bool:
        """Whether flush() has something to do."""
        ...

    @property
    def handle(self) -> Any:
        """To poll for reading."""
        ...

    def send(self, message: bytes) -> None:
        """Raises ConnectionClosed."""
        ...

    def flush(self) -> None: ...

    def receive(self) -> list[bytes]:
        """Raises ConnectionClosed."""
        ...

    def close(self) -> None: ...


def dial_scheduler(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes) -> OrderConnection:
    """identity: the name of the stage. Raises ConnectionClosed."""
    if endpoint.startswith(UNIX):
        control = connect(endpoint.removeprefix(UNIX))
        control.send(identity)
        return control
    return ZmqOrderConnection(context, endpoint, identity)


class ZmqOrderConnection:
    """A OrderConnection over ZMQ."""

    unsent = False  # libzmq sees to it

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes) -> None:
        self.handle = context.socket(zmq.DEALER)
        self.handle.routing_id = identity
        self.handle.set_hwm(0)
        self.handle.ipv6 = True
        # What is on a connection that breaks is lost, and a stage that missed an order must not go on.
        self.handle.reconnect_ivl = -1
        self.handle.linger = 1000
        self.handle.connect(endpoint)

    def send(self, message: bytes) -> None:
        self.handle.send(message)

    def flush(self) -> None:
        """Nothing is kept here."""

    def receive(self) -> list[bytes]:
        messages: list[bytes] = []
        while len(messages) < MESSAGES_PER_PASS:
            try:
                messages.append(self.handle.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        self.handle.close()
