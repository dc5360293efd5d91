"""The seam between a loop and whatever talks to the outside of it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Event = TypeVar("Event", covariant=True)
Command = TypeVar("Command", contravariant=True)


class EventSource(Protocol[Event, Command]):
    """Owns sockets on behalf of one loop, in that loop's thread. No call blocks.

    The loop polls sockets() for reading, calls receive() when one is readable, apply() for each command, and
    tick() when next_deadline() has passed. Each returns the events that came of it, in order.
    """

    def sockets(self) -> Sequence[Any]:
        """ZMQ sockets and file descriptors to poll for reading; may change from call to call."""
        ...

    def receive(self, now: float) -> Sequence[Event]:
        """Take what has come in, in a bounded pass."""
        ...

    def apply(self, command: Command, now: float) -> Sequence[Event]: ...

    def tick(self, now: float) -> Sequence[Event]: ...

    def next_deadline(self) -> float | None:
        """When tick() wants to be called, in the clock's seconds; None when nothing is timed."""
        ...

    def close(self) -> None: ...
