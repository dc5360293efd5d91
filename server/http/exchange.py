"""One request and its answer, as ASGI has them: receive(), send(), and what of it goes over the wire."""

import asyncio
import logging
import re
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message, Scope

from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo
from headrace.server.http.error_response import error_body
from headrace.server.http.head import Head

log = logging.getLogger(__name__)

UNREAD_BODY = 64 << 10  # bytes of a body that are kept for the application before the client has to wait
_IN_NAMES = re.compile(rb"[\x00-\x20\x7f-\xff()<>@,;:\[\]={}\\\"/?]")
_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = (204, 304)
_BUG = ErrorInfo(code="internal_error", message="internal error; see the log", status=500)
_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def status_line(status: int) -> bytes:
    """The first line of an answer, with its end."""
    return _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


class _Date:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        """The header as a line."""
        if (second := int(wall_time())) != self._second:
            self._second, self._line = second, f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


date_line = _Date().line


def closing_answer(info: ErrorInfo) -> bytes:
    """An error as a whole answer, after which the connection is closed."""
    body = msgspec.json.encode(error_body(info))
    retry = b"" if info.retry_after_s is None else b"retry-after: %d\r\n" % max(1, round(info.retry_after_s))
    head = b"content-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n" % (retry, len(body))
    return status_line(info.status) + date_line() + head + body


class Wire(Protocol):
    """The connection that a request has come on."""

    def write(self, data: bytes) -> None:
        """Queue bytes for the client."""

    async def writable(self) -> None:
        """Wait until the client has read most of what is queued."""

    def resume_reading(self) -> None:
        """More of the body may come."""

    def pause_reading(self) -> None:
        """Nothing more shall come for now."""

    def answered(self, exchange: "Exchange") -> None:
        """The answer is complete."""

    def give_up(self) -> None:
        """Close the connection though the answer is not complete."""


class Exchange:
    """A request whose head has come. Used by the event loop only."""

    def __init__(self, wire: Wire, head: Head, scope: Scope) -> None:
        self.head = head
        self.scope = scope
        self.keep_alive = head.keep_alive
        self.whole = False
        """Whether the body has come to its end."""
        self.started = False
        """Whether the head of the answer was sent, or is about to be."""
        self.complete = False
        """Whether the answer was sent."""
        self.continues = head.expects_continue
        """Whether the client waits for a word before it sends the body."""
        self._wire = wire
        self._body = bytearray()
        self._news = asyncio.Event()
        self._gone = False  # the client, or the framing of its body
        self._first = b""  # the head of the answer, while it waits for its body
        self._left: int | None = None  # bytes of the answer, where it has a length
        self._chunked = False
        self._bodiless = False

    def feed(self, body: bytes) -> None:
        """A part of the body has come. What comes after the answer is thrown away."""
        self.continues = False
        if self.complete:
            return
        self._body += body
        if len(self._body) > UNREAD_BODY:
            self._wire.pause_reading()
        self._news.set()

    def end_of_body(self) -> None:
        """The body is whole."""
        self.whole = True
        self.continues = False
        self._news.set()

    def disconnect(self) -> None:
        """Nothing more of the request comes, and the answer has no reader."""
        self._gone = True
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Have the application answer. A bug in it ends in a 500, or in a connection that is closed."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            log.error("Exception in ASGI application", exc_info=error)
        else:
            if self.complete or self._gone:
                return
            log.error("ASGI application returned without completing its answer")
        if self.complete or self._gone:
            return
        if not self.started:
            self.started = True
            self._wire.write(closing_answer(_BUG))
        self._wire.give_up()

    async def receive(self) -> Message:
        """The next part of the body; a disconnect after the answer, or when the client has gone."""
        if self.continues and not self.started:
            self.continues = False
            self._wire.write(CONTINUE)
        if not self._gone and not self.complete:
            self._wire.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = self._body, bytearray()
        return {"type": "http.request", "body": bytes(body), "more_body": not self.whole}

    async def send(self, message: Message) -> None:
        """Send the head of the answer or a part of its body. Raises RuntimeError for what is no answer."""
        await self._wire.writable()
        if self._gone:
            return
        if not self.started and message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        elif self.started and not self.complete and message["type"] == "http.response.body":
            self._part(message.get("body", b""), last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._bodiless = bodiless = self.head.method == "HEAD" or status in _BODILESS
        lines = [status_line(status), date_line()]
        for name, value in headers:
            if _IN_NAMES.search(name) or _IN_VALUES.search(value):
                raise RuntimeError(f"no valid header of an answer: {name!r}: {value!r}")
            if name.lower() == b"content-length":
                self._left = int(value)
            lines += (name, b": ", value, b"\r\n")
        self.started = True
        log.debug('"%s %s" %d', self.head.method, self.head.path, status)
        if self._left is None and not bodiless:
            if self.head.version == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # the end of the connection is the end of the answer
        if self.continues:
            self.keep_alive = False  # whether the body comes cannot be known: RFC 9110, section 10.1.1
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self.head.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        if bodiless:
            self._left = None
        head = b"".join(lines)
        if self._left:
            self._first = head  # goes out with the body, which is there
        else:
            self._wire.write(head)

    def _part(self, body: bytes, *, last: bool) -> None:
        if self._bodiless:
            body = b""
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (last and self._left):
                raise RuntimeError("the answer is not as long as its Content-Length")
        if self._chunked:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if last else b"")
        if self._first:
            body, self._first = self._first + body, b""
        if body:
            self._wire.write(body)
        if last:
            self.complete = True
            self._news.set()
            self._wire.answered(self)
