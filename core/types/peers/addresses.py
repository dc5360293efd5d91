"""Hosts and ports as text: loopback and wildcard addresses, HOST:PORT, URLs."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Host names other than localhost count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether a bind address stands for all interfaces: 0.0.0.0, ::, ZMQ's * or an empty text."""
    if host in ("", "*"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """The host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int | str) -> str:
    """HOST:PORT, with IPv6 addresses in brackets."""
    return f"{bracketed(host)}:{port}"


def url(scheme: str, host: str, port: int | str) -> str:
    """SCHEME://HOST:PORT, as HTTP and ZMQ write an address."""
    return f"{scheme}://{host_port(host, port)}"


def usable_host(host: str) -> str:
    """A host by which programs of this machine reach what is bound to one: loopback in the place of a wildcard."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def usable_url(scheme: str, host: str, port: int | str) -> str:
    """What is bound there, as people can use it: usable_host(), and IPv6 addresses in brackets."""
    return url(scheme, usable_host(host), port)


def everywhere(host: str) -> str:
    """What is said after usable_url() of a wildcard: other machines reach it by other addresses."""
    return ", on all addresses of this machine" if is_wildcard(host) else ""
