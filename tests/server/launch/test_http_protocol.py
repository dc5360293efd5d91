"""Limits of the HTTP parser, tested over raw sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from headrace.server.launch.free_port import free_port
from headrace.server.launch.http_protocol import HEAD_BYTES, HttpProtocol

KEPT = b"POST / HTTP/1.1\r\nhost: here\r\n"
START = KEPT + b"connection: close\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"


async def length_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    body = b"%d" % length
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    config = uvicorn.Config(length_of_body, port=port, http=HttpProtocol, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join()


def answer(port: int, *parts: bytes, endless: bytes = b"") -> bytes:
    """The response. endless: sent repeatedly until the server closes the connection."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as connection:
        sent = 0
        with suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            while endless and sent < 64 * HEAD_BYTES:
                connection.sendall(endless)
                sent += len(endless)
                time.sleep(0.001)  # lets the server thread run
        assert sent < 64 * HEAD_BYTES, "the server accepted everything"
        came = b""
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                came += part
        return came


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        pytest.param(START, b"x-more: and more\r\n" * 1000, id="fields"),
        pytest.param(START + b"x-more: ", b"and more " * 1000, id="field"),
        pytest.param(b"POST /", b"and/more" * 1000, id="path"),
        pytest.param(CHUNKED + b"0\r\n", b"x-more: and more\r\n" * 1000, id="trailers"),
        pytest.param(CHUNKED + b"1;x=", b"more" * 1000, id="chunk extension"),
    ],
)
def test_an_endless_request_is_refused(port: int, start: bytes, endless: bytes) -> None:
    came = answer(port, start, endless=endless)
    assert not came or came.startswith(b"HTTP/1.1 400"), "unless the connection was reset before the answer was read"
    assert answer(port, START + b"content-length: 2\r\n\r\nhi").endswith(b"\r\n\r\n2"), "others are served"


def test_bodies_may_be_long_and_in_small_chunks(port: int) -> None:
    long = 8 * HEAD_BYTES
    assert answer(port, START + b"content-length: %d\r\n\r\n" % long, bytes(long)).endswith(b"\r\n\r\n%d" % long)
    assert answer(port, CHUNKED, b"1\r\nx\r\n" * HEAD_BYTES, b"0\r\n\r\n").endswith(b"\r\n\r\n%d" % HEAD_BYTES)


def test_requests_of_one_connection_are_counted_separately(port: int) -> None:
    body = bytes(HEAD_BYTES // 2)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as connection:
        for _ in range(5):
            connection.sendall(KEPT + b"x-long: " + b"y" * (HEAD_BYTES // 2) + b"\r\n")
            connection.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
            came = b""
            while not came.endswith(b"\r\n\r\n%d" % len(body)):
                came += connection.recv(1 << 16)
            assert came.startswith(b"HTTP/1.1 200")
