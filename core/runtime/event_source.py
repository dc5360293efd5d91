"""The interface between an event loop and what connects it to other processes."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Event = TypeVar("Event", covariant=True)
Command = TypeVar("Command", contravariant=True)


class EventSource(Protocol[Event, Command]):
    """Owns sockets on behalf of one loop (core/runtime/event_loop.py), in that loop's thread. No call blocks.

    The loop polls sockets() for reading, calls receive() when one is readable, apply() for each command, and
    tick() when next_deadline() has passed. Each returns the resulting events, in order.
    """

    def sockets(self) -> Sequence[Any]:
        """ZMQ sockets and file descriptors to poll for reading; may change from call to call."""
        ...

    def receive(self, now: float) -> Sequence[Event]:
        """Read what has arrived, a bounded amount per call."""
        ...

    def apply(self, command: Command, now: float) -> Sequence[Event]:
        """Carry out a command."""
        ...

    def tick(self, now: float) -> Sequence[Event]:
        """Do what is due: heartbeats, retries, timeouts."""
        ...

    def next_deadline(self) -> float | None:
        """When tick() is to be called, in the clock's seconds; None when nothing is timed."""
        ...

    def close(self) -> None:
        """Close the sockets."""
        ...
