"""Waiting for sockets that are mostly the same from one turn of a loop to the next."""

from collections.abc import Callable, Iterable
from select import POLLIN
from typing import Any, Protocol


class Poller(Protocol):
    """select.poll, or zmq.Poller."""

    def register(self, socket: Any, flags: int) -> None: ...

    def poll(self, timeout: int) -> Iterable[tuple[Any, int]]:
        """timeout: in milliseconds."""
        ...


class Poll:
    """Makes a poller anew only when the sockets have changed."""

    def __init__(self, make: Callable[[], Poller]) -> None:
        self._make = make
        self._poller = make()
        self._sockets: tuple[Any, ...] = ()

    def readable(self, sockets: Iterable[Any], timeout_ms: int) -> set[Any]:
        """Those of the sockets (ZMQ's, or file descriptors) that can be read, after this time at the latest."""
        wanted = tuple(sockets)
        if wanted != self._sockets:
            self._sockets, self._poller = wanted, self._make()
            for socket in wanted:
                self._poller.register(socket, POLLIN)
        return {socket for socket, _ in self._poller.poll(timeout_ms)}
