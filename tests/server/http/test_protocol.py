"""Limits of the HTTP parser and on connections, tested over raw sockets."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.config import GatewayConfig, ServerConfig
from headrace.server.http import protocol
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import bind
from headrace.server.http.protocol import HEAD_BYTES, PIPELINED
from headrace.server.http.server import HttpServer, LoopErrors
from tests.scarcity import no_descriptors

KEPT = b"POST / HTTP/1.1\r\nhost: here\r\n"
START = KEPT + b"connection: close\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"


disconnects: list[str] = []
"""Paths of requests whose client has gone."""


async def length_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    length, more = 0, scope["path"] != "/at-once"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            disconnects.append(scope["path"])
            return
        length, more = length + len(message["body"]), message["more_body"]
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})
        return
    body = b"%d" % length
    if scope["path"] == "/long":  # more than kernels take in
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(256):
            await send({"type": "http.response.body", "body": bytes(1 << 18), "more_body": True})
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(connections: HttpConnections, keep_alive_s: float = 60, app: ASGIApp = length_of_body) -> Iterator[int]:
    """The port of a server in a thread."""
    port: Future[int] = Future()
    stops: list[Callable[[], object]] = []

    async def main() -> None:
        server = HttpServer(app, connections, keep_alive_s)
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(server.close))
        (listener,) = bind("127.0.0.1", 0, "port")
        running = asyncio.create_task(server.serve([listener]))
        await server.listens.wait()
        port.set_result(listener.getsockname()[1])
        await running

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield port.result(timeout=10)
    finally:
        stops[0]()
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(HttpConnections(100)) as port:
        yield port


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
    assert not came or came.startswith(b"HTTP/1.1 4"), "unless the connection was reset before the answer was read"
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
                part = connection.recv(1 << 16)
                assert part, "the server has closed the connection"
                came += part
            assert came.startswith(b"HTTP/1.1 200")


LIMIT = 8


@pytest.fixture
def crowded() -> Iterator[int]:
    """The port of a server that takes few connections."""
    with serving(HttpConnections(LIMIT)) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def came(connection: socket.socket) -> bytes:
    """All that comes until the end of the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def ask(connection: socket.socket) -> None:
    """One request on a connection that stays open."""
    connection.sendall(KEPT + b"content-length: 1\r\n\r\nx")
    came = b""
    while not came.endswith(b"\r\n\r\n1"):
        part = connection.recv(1 << 16)
        assert part, "it was closed"
        came += part


def test_idle_connections_keep_no_client_out(crowded: int) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(crowded)) for _ in range(4 * LIMIT)]
        assert answer(crowded, START + b"content-length: 2\r\n\r\nhi").endswith(b"\r\n\r\n2")
        for connection in idle[: 3 * LIMIT + 1]:
            assert came(connection) == b"", "the oldest ones are closed"
        ask(idle[-1])


def test_half_a_head_is_idle_and_half_a_body_is_not(crowded: int) -> None:
    with ExitStack() as stack:
        busy = stack.enter_context(connect(crowded))
        busy.sendall(START + b"content-length: 6\r\nexpect: 100-continue\r\n\r\n")
        assert busy.recv(100).startswith(b"HTTP/1.1 100"), "its head has come"
        slow = [stack.enter_context(connect(crowded)) for _ in range(2 * LIMIT)]
        for connection in slow:
            with suppress(ConnectionError):
                connection.sendall(START)
        assert came(slow[0]) == b""
        busy.sendall(b"abcdef")
        assert came(busy).endswith(b"\r\n\r\n6")


def test_an_answered_connection_is_idle_again(crowded: int) -> None:
    with ExitStack() as stack:
        kept = []
        for _ in range(3 * LIMIT):
            connection = stack.enter_context(connect(crowded))
            ask(connection)
            kept.append(connection)
        assert came(kept[0]) == b""
        ask(kept[-1])


def test_where_all_connections_are_busy_a_new_one_is_told(crowded: int) -> None:
    with ExitStack() as stack:
        for _ in range(LIMIT):
            busy = stack.enter_context(connect(crowded))
            busy.sendall(START + b"content-length: 6\r\nexpect: 100-continue\r\n\r\n")
            assert busy.recv(100).startswith(b"HTTP/1.1 100")
        with connect(crowded) as refused:
            assert came(refused).startswith(b"HTTP/1.1 503")
        busy.sendall(b"abcdef")
        assert came(busy).endswith(b"\r\n\r\n6")
        assert answer(crowded, START + b"content-length: 2\r\n\r\nhi").endswith(b"\r\n\r\n2"), "one has ended"


def closed(connections: HttpConnections, reason: str) -> float:
    """How many connections were closed for this reason."""
    samples = {(sample.name, sample.labels): sample.value for sample in connections.statistics()}
    return samples["connections_closed_total", ("http", reason)]


def test_some_requests_may_wait_for_the_answer_to_the_first_and_a_flood_may_not() -> None:
    connections = HttpConnections(LIMIT)
    request = KEPT + b"content-length: 1\r\n\r\nx"
    with serving(connections) as port:
        assert answer(port, request * PIPELINED, START + b"content-length: 0\r\n\r\n").count(b"200 OK") == 1 + PIPELINED
        assert answer(port, request * 100_000).count(b"200 OK") <= 1
        assert closed(connections, "refused") == 1
        with connect(port) as other:
            ask(other)


def test_a_connection_whose_answer_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_S", 0.3)
    connections = HttpConnections(LIMIT)
    with serving(connections) as port, ExitStack() as stack:
        mute = [stack.enter_context(connect(port)) for _ in range(LIMIT)]
        for each in mute:
            each.sendall(b"GET /long HTTP/1.1\r\nhost: here\r\n\r\n")
        deadline = time.monotonic() + 10
        while closed(connections, "unread") < LIMIT:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(came(mute[0])) < 256 << 18
        slow = stack.enter_context(connect(port))
        slow.sendall(b"GET /long HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        time.sleep(0.1)
        assert len(came(slow)) > 256 << 18, "one that reads in the end has it all"


def test_half_a_head_has_a_deadline_and_its_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    connections = HttpConnections(LIMIT)
    with serving(connections) as port:
        assert answer(port, START[:20]).startswith(b"HTTP/1.1 408")
        with connect(port) as kept:
            ask(kept)
            kept.sendall(START)
            assert came(kept).startswith(b"HTTP/1.1 408"), "after another request, too"
        assert closed(connections, "slow") == 2


def test_a_connection_without_a_request_is_closed_after_the_time_that_is_set() -> None:
    with serving(HttpConnections(LIMIT), keep_alive_s=0.5) as port, connect(port) as new, connect(port) as used:
        began = time.monotonic()
        assert came(new) == b""
        assert 0.3 < time.monotonic() - began < 10
        assert came(used) == b""
    with serving(HttpConnections(LIMIT), keep_alive_s=0.5) as port, connect(port) as used:
        time.sleep(0.3)
        ask(used)
        time.sleep(0.3)
        ask(used)
        assert came(used) == b"", "each answer begins the time anew"


def test_connections_outlive_the_pools_of_clients_and_balancers() -> None:
    for config in (ServerConfig(), GatewayConfig()):
        assert config.keep_alive_s > 600, "75 s of nginx, 90 s of Go, 600 s of cloud balancers"


def test_the_rest_of_a_body_that_is_answered_may_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    request = b"POST /at-once HTTP/1.1\r\nhost: here\r\ncontent-length: 6\r\n\r\nabc"
    with serving(HttpConnections(LIMIT)) as port, connect(port) as connection:
        connection.sendall(request)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"def")
        ask(connection)
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)
    with serving(HttpConnections(LIMIT)) as port, connect(port) as connection:
        connection.sendall(request)
        assert came(connection).startswith(b"HTTP/1.1 200"), "and then it is closed"


def test_an_answer_before_the_body_was_asked_for_is_the_last_one(port: int) -> None:
    head = b"POST /at-once HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\ncontent-length: 6\r\n\r\n"
    with connect(port) as connection:
        connection.sendall(head)
        assert b"connection: close" in connection.recv(1000)
        with suppress(ConnectionError):
            connection.sendall(KEPT + b"\r\n")  # by a client that has not sent the body
        assert came(connection) == b""


def test_a_client_that_closes_its_side_has_gone() -> None:
    disconnects.clear()
    with serving(HttpConnections(LIMIT)) as port, connect(port) as connection:
        connection.sendall(b"POST /left HTTP/1.1\r\nhost: here\r\ncontent-length: 6\r\n\r\nabc")
        connection.shutdown(socket.SHUT_WR)
        assert came(connection) == b""
        deadline = time.monotonic() + 10
        while not disconnects:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert disconnects == ["/left"]


def test_trailers_are_no_headers() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    with serving(HttpConnections(LIMIT), app=app) as port:
        assert answer(port, CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: me\r\n\r\n").startswith(b"HTTP/1.1 204")
    assert seen == [{b"host": b"here", b"connection": b"close", b"transfer-encoding": b"chunked"}]


def test_an_answer_without_a_length_ends_with_the_connection_of_an_old_client(port: int) -> None:
    received = answer(port, b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"onetwo"


def test_a_bug_in_the_application_is_a_500_or_a_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] != "/early":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] != "/forgets":
            raise ValueError("a bug")

    with serving(HttpConnections(LIMIT), app=app) as port:
        assert answer(port, b"GET /early HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 500")
        for path in (b"late", b"forgets"):
            received = answer(port, b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            assert received.endswith(b"1\r\nx\r\n"), "without the chunk that ends a body"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3


def test_accepting_anew_at_a_closed_server_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        closed = socket.socket()
        closed.close()
        loop.call_soon(loop.add_reader, closed.fileno(), print)
        loop.call_soon(loop.add_reader, "a name", print)
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    [record] = caplog.records
    assert "add_reader(" in record.getMessage()
    assert record.exc_info is not None
    assert "a name" in str(record.exc_info[1])


def test_a_lack_of_descriptors_is_said_once_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        errors = LoopErrors()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(errors)
        server = HttpServer(length_of_body, HttpConnections(LIMIT), keep_alive_s=60)
        (listener,) = bind("127.0.0.1", 0, "port")
        serving = asyncio.create_task(server.serve([listener]))
        await server.listens.wait()
        with connect(listener.getsockname()[1]) as connection:
            with no_descriptors():
                while not any(sample.value for sample in errors.statistics()):
                    await asyncio.sleep(0.01)
            connection.sendall(START + b"content-length: 2\r\n\r\nhi")
            connection.setblocking(False)
            came = b""
            while part := await loop.sock_recv(connection, 1000):
                came += part
        assert came.endswith(b"\r\n\r\n2")
        server.close()
        await serving

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(main(), 30))
    assert [record.getMessage() for record in caplog.records] == [
        "socket.accept() out of system resource: [Errno 24] Too many open files"
    ]
