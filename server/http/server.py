"""uvicorn with the HTTP/1.1 protocol of this package, and errors of the event loop that clients cause."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headrace.core.runtime.process import SHORTAGES
from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters, Sample
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import taken_since
from headrace.server.http.protocol import HttpProtocol

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait in the kernel
ACCEPTED_AT_ONCE = 32  # of them, in one turn of the event loop: what one turn accepts is not bounded by the limit yet
LAST_ANSWERS_S = 2.0  # open requests have been drained, or cut, before


class HttpServer(uvicorn.Server):
    """uvicorn until close(), with the signals left to the caller, who drains before the port is closed.

    The protocol is given to uvicorn as Config.http. What uvicorn would do for its own ones (proxy headers, access log,
    keep-alive, the count of connections) is off, or done by the protocol.
    """

    def __init__(self, app: ASGIApp, connections: HttpConnections, keep_alive_s: float) -> None:
        """keep_alive_s: for which a connection stays open without a request."""
        self._app = app
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self.listens = asyncio.Event()
        """Connections are accepted."""
        super().__init__(
            uvicorn.Config(
                app,
                http=self._protocol,  # type: ignore[arg-type]  # any maker of a protocol, as uvicorn calls it
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                backlog=ACCEPTED_AT_ONCE,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio has one number for the kernel's queue and for what it accepts at once; here they differ.
        Raises ConfigError for a socket that is bound to a port where another process has begun to listen."""
        for bound in sockets or ():
            try:
                bound.listen(ACCEPTED_AT_ONCE)
            except OSError as error:
                raise taken_since(bound, error) from error
        await super().startup(sockets)
        for listener in (listener for server in self.servers for listener in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(BACKLOG)
        self.listens.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, and the connections after their last answers."""
        for server in self.servers:
            server.close()
        await self._connections.end(LAST_ANSWERS_S)

    def close(self) -> None:
        """Make serve() return, after the last answers."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    def _protocol(self, **_given: Any) -> HttpProtocol:
        """Make a connection's protocol. What uvicorn gives it (configuration, its own state) has no use there."""
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
