"""Ports that are free."""

import contextlib
import random
import socket
from collections.abc import Iterator
from itertools import cycle

# Below the range that systems give to outgoing connections, so that none of those takes a port before its server does.
_PORTS = range(20_000, 32_768)
_START = random.randrange(len(_PORTS))
_walk: Iterator[int] = cycle((*_PORTS[_START:], *_PORTS[:_START]))


def free_port() -> int:
    """A loopback port that nobody listens on now. One process goes through all of them before it names one again, and
    another process is elsewhere: of the servers that are about to listen, no two were told the same."""
    while True:
        port = next(_walk)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
