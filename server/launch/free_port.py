"""Free TCP ports on loopback."""

import contextlib
import random
import socket
from collections.abc import Iterator
from itertools import cycle

# Below the ephemeral range, so that no outgoing connection takes a port before its server binds it.
_PORTS = range(20_000, 32_768)
_START = random.randrange(len(_PORTS))
_walk: Iterator[int] = cycle((*_PORTS[_START:], *_PORTS[:_START]))


def free_port() -> int:
    """Returns a loopback port that no process is bound to.

    A process walks through the whole range, from a random start, before it repeats a port: servers that are started at
    the same time get different ones.
    """
    while True:
        port = next(_walk)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
