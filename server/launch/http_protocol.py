"""HTTP/1.1 for uvicorn on llhttp, with limits on connections and on what a request may contain besides its body."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.core.runtime.log_throttle import LogThrottle
from headrace.core.runtime.process import SHORTAGES
from headrace.core.stats import Counters, Sample
from headrace.server.launch.http_listeners import taken_since

log = logging.getLogger(__name__)

HEAD_BYTES = 64 << 10  # limit of a request's head; checked after each read
PIPELINED = 16  # requests of one connection that may wait for the answer to the one before
UNREAD_S = 60.0  # for which a client may leave an answer unread that is larger than what kernels and buffers take
CHUNKING = 8  # bytes of chunk framing allowed per byte of a body
BACKLOG = 2048  # connections that wait in the kernel
ACCEPTED_AT_ONCE = 32  # of them, in one turn of the event loop: what one turn accepts is not bounded by the limit yet
TOO_MANY = b"Too many connections are open, each with a request."
STOPPED = b"The server is stopping."
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s"
)


class HttpConnections:
    """The open HTTP connections of this process, bounded. For a new connection above the limit, the longest idle one is
    closed; if none is idle, the new one is refused. Idle: no request on it whose head has come and which is not
    answered."""

    def __init__(self, limit: int) -> None:
        self.leaving = False
        """Every connection is closed when its request is answered: the client's next one goes to another server."""
        self._limit = limit
        self._idle: dict[HttpProtocol, None] = {}  # longest idle first
        self._busy: set[HttpProtocol] = set()
        self._quiet = LogThrottle()
        self._counters = Counters()
        for reason in ("shed", "refused", "unread"):
            self._counters.add("connections_closed_total", 0, ("http", reason))

    def add(self, connection: "HttpProtocol", now: float) -> None:
        """A connection was accepted."""
        if len(self._idle) + len(self._busy) >= self._limit:
            self._counters.add("connections_closed_total", labels=("http", "shed" if self._idle else "refused"))
            if self._quiet.due("limit", now):
                log.warning(
                    "%d HTTP connections are open, which is the limit: closing the longest idle one", self._limit
                )
            if not self._idle:
                connection.refuse()
                return
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.transport.abort()
        self._idle[connection] = None

    def busy(self, connection: "HttpProtocol") -> None:
        """The connection has an open request."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def idle(self, connection: "HttpProtocol") -> None:
        """All requests of the connection are answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def abort(self, connection: "HttpProtocol", reason: str) -> None:
        """Close a connection at once, with what is queued for it. reason: "refused" or "unread"."""
        self._counters.add("connections_closed_total", labels=("http", reason))
        self.remove(connection)
        connection.transport.abort()

    def remove(self, connection: "HttpProtocol") -> None:
        """The connection is closed. Does nothing if it was removed before."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def leave(self) -> None:
        """Close each connection with its next answer, and say so there."""
        self.leaving = True
        for connection in self._busy:
            connection.close_when_answered()

    def close_idle(self) -> None:
        """Close the idle connections: whatever would come on them is refused."""
        for connection in self._idle:
            connection.transport.close()

    def cut(self) -> None:
        """End all requests that are open."""
        for connection in list(self._busy):
            connection.cut()

    def statistics(self) -> tuple[Sample, ...]:
        """Open connections, and those that were closed."""
        count = len(self._idle) + len(self._busy)
        return (Sample("connections", count, ("http",)), *self._counters.snapshot())


class HttpProtocol(HttpToolsProtocol):
    """Rejects requests whose head, trailers and chunk framing are too long, and closes connections that send one
    request after the other without waiting for answers, or do not read these.

    The parser buffers the former without a limit, and uvicorn queues requests without one, so a client could exhaust
    the memory. Bodies are limited where they are read (server/api/request/body.py).
    """

    _unread: asyncio.TimerHandle | None = None
    _received = 0  # bytes of the current request
    _body = 0  # of these, bytes of its body

    def __init__(self, open_connections: HttpConnections, **given: Any) -> None:
        super().__init__(**given)
        self._open = open_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; close the longest idle one if there are too many."""
        super().connection_made(transport)
        self._open.add(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._open.remove(self)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read so much that nothing more is written; close the connection if it stays so."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self._open.abort, self, "unread")

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def refuse(self) -> None:
        """Close a new connection, saying why."""
        self.transport.write(REFUSAL % (len(TOO_MANY), TOO_MANY))
        self.transport.close()

    def close_when_answered(self) -> None:
        """Make the last request that has come the last one of the connection."""
        self.cycle.keep_alive = False

    def cut(self) -> None:
        """Close the connection though its request is not answered, saying why where no answer was begun."""
        if self.cycle.response_started:
            self.transport.abort()
        else:
            self.transport.write(REFUSAL % (len(STOPPED), STOPPED))
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse, then respond with 400 if the request is over the limit."""
        self._received += len(data)
        super().data_received(data)
        if len(self.pipeline) > PIPELINED:
            self._open.abort(self, "refused")
        elif self._received > HEAD_BYTES + (1 + CHUNKING) * self._body and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {HEAD_BYTES} bytes besides its body.")

    def on_message_begin(self) -> None:
        """Count anew for each request of the connection. Raises OverflowError, which ends the parsing of what was read,
        if too many wait."""
        if len(self.pipeline) > PIPELINED:
            raise OverflowError
        super().on_message_begin()
        self._received = self._body = 0

    def on_headers_complete(self) -> None:
        """A request has begun: the connection is not idle."""
        super().on_headers_complete()
        if self._open.leaving:
            self.close_when_answered()
        self._open.busy(self)

    def on_body(self, body: bytes) -> Any:
        """Count the bytes of the body."""
        self._body += len(body)
        return super().on_body(body)

    def on_response_complete(self) -> None:
        """The connection is idle again."""
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # else the next one has begun
            self._open.idle(self)


def uvicorn_config(app: ASGIApp, host: str, port: int, connections: HttpConnections, *, debug: bool) -> uvicorn.Config:
    """How uvicorn serves an application on one port. debug: log each request."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=debug,
        timeout_graceful_shutdown=2,  # open requests have been drained, or cut, before
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
        http=partial(HttpProtocol, connections),  # type: ignore[arg-type]
        ws="none",
    )


class HttpServer(uvicorn.Server):
    """uvicorn with the signals left to us: it would close its port before the work in flight has ended."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


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
