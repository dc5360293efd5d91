"""One HTTP/1.1 connection of a client: llhttp parses, and what it leaves to its user is done here. uvicorn runs it.

llhttp is the parser of Node.js: strict about framing, and written in C. This class uses the interface that httptools
documents. uvicorn's own protocol on the same parser loses the body of a request that offers an upgrade, merges trailers
into the headers and sends chunks to HTTP/1.0. h11 does not, but takes bare line feeds and folded headers, and runs
Python for each chunk of a body. docs/operations.md has a table of what is done with which head.
"""

import asyncio
from collections import deque
from typing import Any

import httptools
from starlette.types import ASGIApp, Scope

from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.http.connections import HttpConnections
from headrace.server.http.exchange import Exchange, closing_answer
from headrace.server.http.head import BAD_REQUEST, Headers, read_head

HEAD_BYTES = 64 << 10  # limit of a request's head; checked after each read
HEAD_S = 60.0  # from the first byte of a head to its last one
PIPELINED = 16  # requests of one connection that may wait for the answer to the one before
UNREAD_S = 60.0  # for which a client may leave an answer unread that is larger than what kernels and buffers take
CHUNKING = 8  # bytes of chunk framing allowed per byte of a body
LINGER_S = 30.0  # for what a client still sends of a request that is answered
LINGER_BYTES = 1 << 20  # of it, on a connection that is to be closed
TLS = b"\x16\x03"  # how a TLS handshake begins
_SAID = {  # what llhttp says, where another status than 400 is right
    "Invalid HTTP version": (505, "http_version_not_supported", "this HTTP version is not spoken here: send HTTP/1.1"),
    "Pause on PRI/Upgrade": (505, "http_version_not_supported", "HTTP/2 is not spoken here: send HTTP/1.1"),
    "Invalid method encountered": (501, "not_implemented", "the method is not known here"),
}


class HttpProtocol(asyncio.Protocol):
    """Reads requests, has the application answer them in their order, and closes connections of clients that send too
    much besides bodies, too slowly, or without reading.

    The parser buffers nothing but keeps no limit either; bodies are limited where they are read (http/body.py).
    """

    transport: asyncio.Transport

    def __init__(self, app: ASGIApp, connections: HttpConnections, keep_alive_s: float) -> None:
        """keep_alive_s: for which the connection stays open without a request."""
        self._app = app
        self._open = connections
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._parser = _parser(self)
        self._answering: Exchange | None = None
        self._waiting: deque[Exchange | ErrorInfo] = deque()  # their answers follow
        self._reading: Exchange | None = None  # its head has come, its body not yet
        self._in_head = self._slow = False  # a head has begun; has a deadline
        self._last = False  # no request is taken any more
        self._target = b""
        self._headers: Headers = []
        self._problem: ErrorInfo | None = None  # found in a callback of the parser
        self._deaf = False  # the parser reads a head that it knows
        self._received = self._body = self._discarded = 0  # bytes of the request; of its body; after the last one
        self._writable = asyncio.Event()
        self._writable.set()
        self._unread: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; close the longest idle one if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._base: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "root_path": "",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
        }
        self._within(self._keep_alive_s)
        self._open.add(self, self._loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection; the request that is being answered is given up."""
        self._open.remove(self)
        self._within(None)
        self._waiting.clear()
        self.resume_writing()
        if self._answering is not None:
            self._answering.disconnect()
        self._answering = self._reading = None  # they refer to this object, as the parser does
        del self._parser

    def data_received(self, data: bytes) -> None:
        """Parse; refuse what is no request, and what is over a limit."""
        if self._last and self._reading is None:
            self._discard(len(data))
            return
        self._received += len(data)
        try:
            rest = data
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError as error:
            if len(self._waiting) > PIPELINED:
                self._open.abort(self, "refused")
            elif not self._last or self._reading is not None:
                self._refuse(self._problem or _explained(error, data))
            return
        whole = self._answering is not None and self._reading is None and not self._in_head
        if not whole and self._received > HEAD_BYTES + (1 + CHUNKING) * self._body:
            self._refuse(self._too_long())
        elif self._in_head and not self._slow:
            self._slow = True
            if self._answering is None:
                self._within(HEAD_S)

    def eof_received(self) -> None:
        """The client has closed its side, which is taken for a disconnect: asyncio closes the connection."""

    def pause_writing(self) -> None:
        """The client has not read so much that nothing more is written; close the connection if it stays so."""
        self._writable.clear()
        self._unread = self._loop.call_later(UNREAD_S, self._open.abort, self, "unread")

    def resume_writing(self) -> None:
        """The client reads."""
        self._writable.set()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # The parser.

    def _parse(self, data: bytes) -> bytes:
        """Returns what is left to be parsed. Raises httptools.HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline()
            return data[upgrade.args[0] :]
        return b""

    def _decline(self) -> None:
        """Serve a request that offers another protocol as any other (RFC 9110, section 7.8). llhttp takes what follows
        its head for that protocol: a new parser is told where the body ends, and reads on."""
        if self._reading is not None:
            self._parser = _parser(self)
            self._deaf = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + self._reading.head.framing + b"\r\n")
            self._deaf = False

    def on_message_begin(self) -> None:
        """Count anew for each request of the connection. Raises OverflowError, which ends the parsing of what was read,
        if too many wait or the one before was the last one."""
        if self._deaf:
            return
        if self._last or len(self._waiting) > PIPELINED:
            raise OverflowError
        self._received = self._body = 0
        self._target = b""
        self._headers = []
        self._in_head = True
        self._slow = False

    def on_url(self, url: bytes) -> None:
        """A part of the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are left out: they may not be taken for headers (RFC 9110, section 6.5.1)."""
        if self._reading is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A request has begun: the connection is not idle. Raises HeadraceError for one that is refused."""
        if self._deaf:
            return
        try:
            if len(self._target) + sum(len(name) + len(value) for name, value in self._headers) > HEAD_BYTES:
                raise HeadraceError(self._too_long())
            head = read_head(self._parser.get_method(), self._parser.get_http_version(), self._target, self._headers)
        except HeadraceError as error:
            self._problem = error.info
            raise
        self._in_head = False
        scope = {
            **self._base,
            "http_version": head.version,
            "method": head.method,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "state": {},
        }
        self._reading = exchange = Exchange(self, head, scope)
        if self._open.leaving:
            exchange.keep_alive = False
        self._open.busy(self)
        if self._answering is None:
            self._answer(exchange)
        else:
            self.transport.pause_reading()
            self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body += len(body)
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        """The request is whole, unless its body comes after an upgrade that is declined."""
        exchange = self._reading
        if exchange is None or (self._parser.should_upgrade() and exchange.head.framing):
            return
        self._reading = None
        self._last = self._last or not exchange.keep_alive
        exchange.end_of_body()
        if self._answering is None:  # it was answered before
            self._wait_for_request()

    # Answers.

    def write(self, data: bytes) -> None:
        """See Wire."""
        self.transport.write(data)

    async def writable(self) -> None:
        """See Wire."""
        if not self._writable.is_set():
            await self._writable.wait()

    def pause_reading(self) -> None:
        """See Wire."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """See Wire."""
        self.transport.resume_reading()

    def give_up(self) -> None:
        """See Wire."""
        self.transport.close()

    def answered(self, exchange: Exchange) -> None:
        """Answer the next request; without one the connection is idle, or closed."""
        self._answering = None
        if self.transport.is_closing():
            return
        if not exchange.keep_alive:
            self._close(linger=not exchange.whole)
        elif not self._waiting:
            self.transport.resume_reading()
            self._open.idle(self)
            self._wait_for_request()
        elif isinstance(following := self._waiting.popleft(), Exchange):
            self._answer(following)
        else:
            self._answer_refused(following)

    def refuse(self) -> None:
        """Close a new connection, saying why."""
        self.write(closing_answer(refusals.CONNECTIONS.error()))
        self.transport.close()

    def close_when_answered(self) -> None:
        """Make the last request that has come the last one of the connection."""
        newest = self._waiting[-1] if self._waiting else self._answering
        if isinstance(newest, Exchange):
            newest.keep_alive = False

    def cut(self) -> None:
        """Close the connection though its request is not answered, saying why where no answer was begun."""
        if self._answering is None or self._answering.started:
            self.transport.abort()
        else:
            self._answering.disconnect()
            self.write(closing_answer(refusals.STOPPING.error()))
            self.transport.close()

    def _answer(self, exchange: Exchange) -> None:
        self._within(None)
        self._answering = exchange
        self._open.run(exchange.run(self._app))

    def _refuse(self, info: ErrorInfo) -> None:
        """Answer what is no request, after those before it, and close the connection."""
        self._open.warn(f"refused an HTTP request: {info.message}", self._loop.time())
        self._last = True
        broken, self._reading = self._reading, None
        if broken is not None:  # its body
            broken.disconnect()
        if self._answering is not None and broken is not self._answering:
            if broken is not None:
                self._waiting.remove(broken)
            self._waiting.append(info)
        elif broken is not None and broken.started:
            self._answering = None
            self._close(linger=True)
        else:
            self._answering = None
            self._answer_refused(info)

    def _answer_refused(self, info: ErrorInfo) -> None:
        self.write(closing_answer(info))
        self._close(linger=True)

    def _close(self, *, linger: bool) -> None:
        """Close the connection, which has had its last answer. linger: read for a while what the client still sends, as
        a reset could take the answer from it (RFC 9112, section 9.6)."""
        if not linger:
            self.transport.close()
            return
        self._last = True
        self._reading = None
        self._open.idle(self)
        self.transport.resume_reading()
        self.transport.write_eof()
        self._within(LINGER_S)

    def _discard(self, size: int) -> None:
        """Bytes have come after the last request."""
        self._discarded += size
        if self._discarded > LINGER_BYTES and self._answering is None:
            self.transport.close()

    # Time.

    def _wait_for_request(self) -> None:
        """Bound the time until the next request, or until the end of one that is answered already."""
        self._within(LINGER_S if self._reading is not None else HEAD_S if self._in_head else self._keep_alive_s)

    def _within(self, seconds: float | None) -> None:
        """Close the connection after this time. None: no more."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._in_head and not self._last:
            self._open.count("slow")
            message = f"the head of the request has not come within {HEAD_S:g} s"
            self._refuse(ErrorInfo(code="head_timeout", message=message, status=408))
        else:
            self.transport.close()

    def _too_long(self) -> ErrorInfo:
        """What is over HEAD_BYTES."""
        if self._reading is not None:
            what, status, code = "chunk framing and trailers of the request have", 400, BAD_REQUEST
        elif self._headers and len(self._target) <= HEAD_BYTES:
            what, status, code = "the head of the request has", 431, "headers_too_large"
        else:
            what, status, code = "the request target has", 414, "target_too_long"
        return ErrorInfo(code=code, message=f"{what} more than {HEAD_BYTES} bytes, which is the limit", status=status)


def _parser(user: HttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(user)
    # What comes after the last request is no error: it is not looked at.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _explained(error: httptools.HttpParserError, data: bytes) -> ErrorInfo:
    """The answer to what the parser has refused."""
    if data.startswith(TLS):
        message = "the client speaks TLS, and this port speaks plain HTTP: write http:// in the place of https://"
        return ErrorInfo(code=BAD_REQUEST, message=message, status=400)
    if (said := _SAID.get(str(error))) is not None and data[:1].isalpha():
        status, code, message = said
        return ErrorInfo(code=code, message=message, status=status)
    return ErrorInfo(code=BAD_REQUEST, message=f"this is no valid HTTP request: {error}", status=400)


def _address(name: Any) -> tuple[str, int] | None:
    """Host and port of a TCP socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
