"""Answers that no application has made: a status line, the headers of every answer, and errors as JSON."""

from email.utils import formatdate
from http import HTTPStatus

import msgspec

from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo
from headrace.server.http.error_response import error_body

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
