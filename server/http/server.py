"""An ASGI application on bound sockets, and errors of the event loop that clients cause."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from headrace.core.runtime.log_throttle import LogThrottle
from headrace.core.runtime.process import SHORTAGES
from headrace.core.stats import Counters, Sample
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import taken_since
from headrace.server.http.protocol import HttpProtocol

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait in the kernel
ACCEPTED_AT_ONCE = 32  # of them, in one turn of the event loop: what one turn accepts is not bounded by the limit yet
LAST_ANSWERS_S = 2.0  # open requests have been drained, or cut, before


class HttpServer:
    """Serves an application until close(). It leaves signals alone: the caller drains first."""

    def __init__(self, app: ASGIApp, connections: HttpConnections, keep_alive_s: float) -> None:
        """keep_alive_s: for which a connection stays open without a request."""
        self._app = app
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._closed = asyncio.Event()
        self.listens = asyncio.Event()
        """Connections are accepted."""

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Listen, and serve until close(). Raises ConfigError for a socket that is bound to a port where another
        process has begun to listen."""
        loop = asyncio.get_running_loop()
        servers: list[asyncio.Server] = []
        try:
            for bound in sockets:
                try:
                    server = await loop.create_server(self._protocol, sock=bound, backlog=ACCEPTED_AT_ONCE)
                except OSError as error:
                    raise taken_since(bound, error) from error
                servers.append(server)
                bound.listen(BACKLOG)  # asyncio has one number for the kernel's queue and for what it accepts at once
            self.listens.set()
            await self._closed.wait()
        finally:
            for server in servers:
                server.close()
        await self._connections.end(LAST_ANSWERS_S)

    def close(self) -> None:
        """Make serve() return, after the last answers."""
        self._closed.set()

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self._app, self._connections, self._keep_alive_s)


CLOSED = "Invalid file descriptor: -1"  # what selectors say of a closed socket


class LoopErrors:
    """Exception handler of an event loop that rate-limits accept() errors: without free descriptors asyncio reports one
    for each connection that waits, with a traceback, every second. It goes on accepting by itself. If the server has
    been closed by then, it fails to for each of them, which is not reported."""

    def __init__(self) -> None:
        self._quiet = LogThrottle()
        self._counters = Counters()
        self._counters.add("accept_failures_total", 0, ("http",))

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the event loop."""
        error = context.get("exception")
        if isinstance(error, ValueError) and str(error) == CLOSED:
            return
        if not isinstance(error, OSError) or error.errno not in SHORTAGES:
            loop.default_exception_handler(context)
            return
        self._counters.add("accept_failures_total", labels=("http",))
        if self._quiet.due(str(error), loop.time()):
            log.warning("%s: %s", context["message"], error)

    def statistics(self) -> tuple[Sample, ...]:
        """Counters and gauges for /metrics."""
        return self._counters.snapshot()
