"""Requests that are cancelled at every moment of their lives leave no connection behind; failures have words."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from headrace.integrations.http_client import HEAD, direct_async_client, failure
from tests.faults.relay import RESET

MOMENTS = 60  # turns of the event loop: more than a request takes
PAUSE_S = 0.002  # of the server before it answers
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Site:
    """A server. open: its connections; unused: those of them on which no request has come; accepted: all that there
    were; asked: requests."""

    def __init__(self) -> None:
        self.url = ""
        self.open = self.unused = self.accepted = self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open, self.unused = self.open + 1, self.unused + 1
        first, self.accepted = True, self.accepted + 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.unused, first = self.unused - first, False
                self.asked += 1
                await asyncio.sleep(PAUSE_S)
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.unused -= first
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made


async def cancelled(http: httpx.AsyncClient, url: str, turns: int) -> bool:
    """Ask, and cancel that some turns later. Returns whether it was in time."""
    call = asyncio.create_task(http.get(url))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    [result] = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError | httpx.Response), result
    return not isinstance(result, httpx.Response)


def test_every_moment() -> None:
    async def run() -> None:
        async with site() as there, direct_async_client(timeout=10.0) as http:
            for turns in range(MOMENTS):
                calls = [cancelled(http, there.url, turns) for _ in range(5)]
                assert sum(await asyncio.gather(*calls)) or turns
            async with asyncio.timeout(10):
                while there.unused:
                    await asyncio.sleep(0.01)
            kept, there.asked = there.open, 0
            answers = await asyncio.gather(*(http.get(there.url) for _ in range(5)))
            assert [answer.text for answer in answers] == ["ok"] * 5
            assert there.open <= max(kept, 5), "connections that are kept are used again"

    asyncio.run(run())


def test_what_is_cancelled_before_its_head_is_not_asked() -> None:
    """It is connected first, and then it ends: the server never hears of it."""

    async def run() -> None:
        async with site() as there, direct_async_client(timeout=10.0) as http:
            connecting = asyncio.Event()

            async def saw(event: str, _info: object) -> None:
                if event == "connection.connect_tcp.started":
                    connecting.set()

            call = asyncio.create_task(http.get(there.url, extensions={"trace": saw}))
            await connecting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(10):
                while not there.accepted or there.open:
                    await asyncio.sleep(0.001)
            assert there.asked == 0

    asyncio.run(run())


def test_the_client_closes_while_a_cancelled_request_connects() -> None:
    async def run() -> None:
        async with site() as there:
            async with direct_async_client(timeout=10.0) as http:
                for turns in range(MOMENTS):
                    await cancelled(http, there.url, turns)
            async with asyncio.timeout(10):
                while there.open:
                    await asyncio.sleep(0.001)

    asyncio.run(run())


def test_the_callers_own_trace_is_told_everything() -> None:
    events: list[str] = []

    async def saw(event: str, _info: object) -> None:
        events.append(event)

    async def run() -> None:
        async with site() as there, direct_async_client(timeout=10.0) as http:
            assert (await http.get(there.url, extensions={"trace": saw})).text == "ok"

    asyncio.run(run())
    assert {"connection.connect_tcp.started", HEAD, "http11.receive_response_headers.complete"} <= set(events)


def test_a_response_that_is_cancelled_while_it_is_closed_gives_its_connection_back() -> None:
    async def run() -> None:
        async with site() as there, direct_async_client(timeout=10.0) as http:

            async def saw(event: str, _info: object) -> None:
                if event == "http11.response_closed.started":
                    call.cancel()

            call = asyncio.create_task(http.get(there.url, extensions={"trace": saw}))
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.01)
            assert (await http.get(there.url)).text == "ok"
            assert there.accepted == 1, "it is used again"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("silent", "expected"),
    [(True, "ReadTimeout (no answer in time)"), (False, "ReadError (the connection ended before the answer did)")],
)
def test_a_failure_says_what_happened_where_the_exception_does_not(silent: bool, expected: str) -> None:
    async def ask() -> httpx.HTTPError:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if silent:
                await reader.read()  # until the client is gone
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()  # resets the connection
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, direct_async_client(timeout=0.2) as http:
            with pytest.raises(httpx.HTTPError) as raised:
                await http.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await ended.wait()
        return raised.value

    assert failure(asyncio.run(ask())) == expected
    assert failure(httpx.ConnectError("refused")) == "ConnectError refused"
