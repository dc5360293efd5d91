"""Hosts and ports in text, and addresses that stand for every interface."""

WILDCARDS = ("0.0.0.0", "::", "[::]", "")


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int | str) -> str:
    """HOST:PORT."""
    return f"{bracketed(host)}:{port}"


def url(scheme: str, host: str, port: int | str) -> str:
    """SCHEME://HOST:PORT, as HTTP and ZMQ write an address."""
    return f"{scheme}://{host_port(host, port)}"
