"""Listening socket of a rendezvous store (torch.distributed)."""

import ipaddress
import socket


def listen(host: str, port: int) -> int | None:
    """A listening socket for the store on this address only; by itself the store would listen on every interface.

    None for a host name: it may resolve to another address on its own machine than on others. Raises OSError.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()
