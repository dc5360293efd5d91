"""Hosts and ports in text, and addresses that stand for every interface, or for none that others reach."""

import ipaddress

WILDCARDS = ("0.0.0.0", "::", "[::]", "")


def is_wildcard(host: str) -> bool:
    """True for addresses that stand for every interface of this machine, which no other machine can connect to."""
    return host in WILDCARDS


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches. Names other than localhost count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int | str) -> str:
    """HOST:PORT."""
    return f"{bracketed(host)}:{port}"


def url(scheme: str, host: str, port: int | str) -> str:
    """SCHEME://HOST:PORT, as HTTP and ZMQ write an address."""
    return f"{scheme}://{host_port(host, port)}"
