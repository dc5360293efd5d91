"""Waiting for sockets to become readable, with a timeout in seconds."""

import math
from collections.abc import Callable, Iterable
from select import POLLIN
from typing import Any, Protocol


class Poller(Protocol):
    """select.poll, or zmq.Poller."""

    def register(self, socket: Any, flags: int) -> None:
        """Add a socket to those that are polled."""
        ...

    def poll(self, timeout: int) -> Iterable[tuple[Any, int]]:
        """Wait for a socket. timeout: in milliseconds."""
        ...


class Poll:
    """Polls for reading. Makes a new poller only when the sockets differ from those of the previous call."""

    def __init__(self, make: Callable[[], Poller]) -> None:
        self._make = make
        self._poller = make()
        self._sockets: tuple[Any, ...] = ()

    def readable(self, sockets: Iterable[Any], timeout_s: float) -> set[Any]:
        """Returns those of the ZMQ sockets and file descriptors that are readable, after timeout_s at the latest."""
        wanted = tuple(sockets)
        if wanted != self._sockets:
            self._sockets, self._poller = wanted, self._make()
            for socket in wanted:
                self._poller.register(socket, POLLIN)
        # Rounded up: a wait that ended before its deadline would be repeated, with nothing to do.
        timeout_ms = max(0, math.ceil(1000 * timeout_s))
        return {socket for socket, _ in self._poller.poll(timeout_ms)}
