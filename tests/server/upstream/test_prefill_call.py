"""A prompt that is posted to a prefill server, and connections that end meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.runtime.clock import SystemClock
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.request.request_context import CallSpan, RequestContext
from headrace.server.upstream.prefill_call import PrefillCall
from tests.server.fakes import in_loop


def _call(http: httpx.AsyncClient, url: str) -> PrefillCall:
    span = CallSpan(RequestContext("an id"), url, SystemClock(), lambda _span: None)
    return PrefillCall(http, url, PrefillRequest(), span, posted=lambda: None, answered=lambda: None, running=set())


async def _post(http: httpx.AsyncClient, url: str) -> ErrorInfo | None:
    errors: list[ErrorInfo] = []
    async with _call(http, url) as call:
        call.start(lambda _progress: None, errors.append)
        await call.response()
    return errors[0] if errors else None


@asynccontextmanager
async def http_server(serve: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """serve: is given the number of the connection."""
    count = 0

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await serve(count, reader, writer)
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _take(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    await reader.readexactly(length)


@in_loop
async def test_a_connection_that_was_kept_and_has_ended_is_not_a_lost_server() -> None:
    """The server closes an idle connection while the next prompt is on its way: it is sent once more."""
    served: list[int] = []

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await _take(reader)
            served.append(number)
            if len(served) == 2:
                return  # the second prompt on the first connection: no answer
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()

    async with http_server(serve) as url, httpx.AsyncClient() as http:
        assert await _post(http, url) is None
        assert await _post(http, url) is None
        assert served == [1, 1, 2]


@in_loop
async def test_a_new_connection_that_ends_is_a_lost_server() -> None:
    served: list[int] = []

    async def serve(number: int, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await _take(reader)
        served.append(number)

    async with http_server(serve) as url, httpx.AsyncClient() as http:
        error = await _post(http, url)
        assert error is not None
        assert (error.code, error.at_prefill) == ("prefill_lost", True)
        assert served == [1], "the prompt is not computed a second time by the same server"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with httpx.AsyncClient() as http:
            error = await _post(http, f"http://127.0.0.1:{closed.getsockname()[1]}")
            assert error is not None
            assert error.code == "prefill_unreachable"
