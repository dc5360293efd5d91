"""HTTP/1.1 client of a benchmark: one response at a time on a connection, bytes stamped as they arrive.

General clients take about a millisecond of CPU for a request and a tenth of one for an event, which on a small machine
would be measured as the server's. Connections are kept alive and used again.
"""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from headrace.core.runtime.clock import Clock

REUSED_S = 1.0  # idle connections: servers close those that are idle for longer
Take = Callable[[bytes, float], None]


class ConnectionLost(Exception):
    """The connection ended before the response did, or carried something else than HTTP."""


class BenchConnection(asyncio.Protocol):
    """One connection, as a protocol of asyncio and the callbacks of httptools."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = 0.0
        self._take: Take | None = None
        self._response: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def exchange(self, request: bytes, take: Take) -> "asyncio.Future[int]":
        """Send a request. take: gets the body's bytes with their times. Returns a future of the status."""
        assert self.transport is not None
        self._take, self.reusable = take, False
        self._parser = httptools.HttpResponseParser(self)
        self._response = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._response

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        self._at = self._clock.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the answer is not HTTP")

    def connection_lost(self, _exc: Exception | None) -> None:
        """Fail the open response."""
        self.reusable = False
        self._fail("the connection ended before the response did")

    def on_body(self, body: bytes) -> None:
        """Bytes of the body."""
        if self._take is not None:
            self._take(body, self._at)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._response is None or self._response.done():
            return
        self.reusable = self._parser.should_keep_alive()
        self.idle_since = self._at
        self._response.set_result(self._parser.get_status_code())

    def close(self) -> None:
        """Close the connection; the server takes an open request for cancelled."""
        self._take = None
        if self.transport is not None:
            self.transport.close()

    def _fail(self, message: str) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(ConnectionLost(message))


class HttpClient:
    """Requests to one server. headers: sent with each of them."""

    def __init__(self, url: str, headers: dict[str, str], clock: Clock) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        named = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._clock = clock
        self._idle: list[BenchConnection] = []

    async def post(self, path: str, body: bytes, take: Take) -> int:
        """Send a body. take: gets the answer's bytes with their times. Returns the status. Raises OSError where there
        is no connection to be had, ConnectionLost where it ends too soon."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        connection = self._reused() or await self._connect()
        try:
            return await connection.exchange(head.encode() + body, take)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()

    def _reused(self) -> BenchConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and self._clock.now() - connection.idle_since < REUSED_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> BenchConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: BenchConnection(self._clock), self._host, self._port, ssl=self._tls
        )
        return connection
