"""Waiting for sockets that are mostly the same from one turn of a loop to the next."""

from collections.abc import Iterable
from typing import Any

import zmq


class Poll:
    """A poller that is made anew only when the sockets have changed."""

    def __init__(self) -> None:
        self._sockets: tuple[Any, ...] = ()
        self._poller = zmq.Poller()

    def readable(self, sockets: Iterable[Any], timeout_ms: int) -> set[Any]:
        """Those of the sockets (ZMQ's, or file descriptors) that can be read, after this time at the latest."""
        wanted = tuple(sockets)
        if wanted != self._sockets:
            self._sockets, self._poller = wanted, zmq.Poller()
            for socket in wanted:
                self._poller.register(socket, zmq.POLLIN)
        return {socket for socket, _ in self._poller.poll(timeout_ms)}
