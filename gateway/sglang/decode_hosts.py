"""Which addresses are the decode engines': messages that name another one are dropped, since answers go there."""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from headrace.core.types.peers.addresses import is_loopback

LOOK_UP_S = 5.0  # between two lookups of the engines' names


class DecodeHosts:
    """The addresses of the engines at these URLs. Used by one thread, which waits for the lookup of names.

    An engine on this machine names one of the machine's own addresses, whatever its URL says.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._names = {url: urlsplit(url).hostname or "" for url in urls}
        self._known: dict[str, set[str]] = {name: set() for name in self._names.values()}
        self._looked_up = float("-inf")

    def urls_at(self, address: str) -> tuple[str, ...]:
        """URLs of the engines at an IP address; none if it is none of theirs."""
        if not any(address in known for known in self._known.values()):
            self._look_up()
        own = any(map(is_loopback, self._known)) and _is_own(address)
        return tuple(
            url for url, name in self._names.items() if address in self._known[name] or (own and is_loopback(name))
        )

    def _look_up(self) -> None:
        if time.monotonic() - self._looked_up <= LOOK_UP_S:
            return
        self._looked_up = time.monotonic()
        for name, known in self._known.items():
            with contextlib.suppress(OSError):
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                known |= {str(ipaddress.ip_address(str(one[4][0]).partition("%")[0])) for one in found}


def _is_own(address: str) -> bool:
    """Whether an IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
