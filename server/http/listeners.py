"""The HTTP ports of a server, bound before it starts a process, so that a port that is taken is told at once."""

import errno
import os
import socket
from contextlib import ExitStack

from headrace.core.config import Config
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import url

PRIVILEGED = 1024  # ports below it may be refused to this user


class HttpListeners:
    """Bound sockets of the HTTP ports. They listen, and connections are accepted, once the front end serves."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a port that cannot be bound."""
        server = config.server
        self.main: list[socket.socket] = []
        """Of --port; one for each address of the host."""
        self.bootstrap: list[socket.socket] = []
        """Of --bootstrap-port; empty without one."""
        with ExitStack() as bound:
            bound.callback(self.close)
            self.main += bind(server.host, server.port, "port")
            if server.role == "prefill" and server.bootstrap_port:
                self.bootstrap += bind(server.host, server.bootstrap_port, "bootstrap-port")
            bound.pop_all()

    def close(self) -> None:
        """Close those that are not closed yet."""
        for listener in (*self.main, *self.bootstrap):
            listener.close()


def bind(host: str, port: int, flag: str) -> list[socket.socket]:
    """A bound socket for each address of a host, as asyncio binds them. flag: that names the port.

    Raises ConfigError if the host has no address, or one of them cannot be bound.
    """
    where = url("http", host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {_reason(error)}; write another --host") from error
    with ExitStack() as opened:
        listeners: list[socket.socket] = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError:
                continue  # the kernel has no IPv6
            if listeners and port == 0:  # the free one that the first has found
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            try:
                _bind(listener, address)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {where}: {_reason(error)}; {_advice(error, port, flag)}"
                ) from error
            listeners.append(listener)
        if not listeners:
            raise ConfigError(f"cannot listen on {where}: this machine has no such addresses; write another --host")
        opened.pop_all()
        return listeners


def _bind(listener: socket.socket, address: object) -> None:
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the server before may linger
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
    listener.bind(address)  # type: ignore[arg-type]


def taken_since(listener: socket.socket, error: OSError) -> ConfigError:
    """The mistake of a port that another process listens on since it was bound here."""
    where = url("http", *listener.getsockname()[:2])
    return ConfigError(f"cannot listen on {where}: {_reason(error)}; write another port, or end what listens there")


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def _advice(error: OSError, port: int, flag: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "write another --host"
    if error.errno == errno.EACCES and port < PRIVILEGED:
        return f"write a --{flag} from {PRIVILEGED} on"
    return f"write another --{flag}, or end what listens there"
