"""Ports that are free."""

import contextlib
import random
import socket


def free_port() -> int:
    """A loopback port that nobody listens on now, from below the range that systems give to outgoing connections, so
    that none of those takes it before its server does."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
