"""The applications of the project, each at a real HTTP server, and raw exchanges with them."""

import asyncio
import io
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

import pytest
from fastapi import FastAPI

from headrace.core.config import GatewayConfig
from headrace.gateway.sglang.gateway import SglangGateway
from headrace.gateway.sglang.routes import create_sglang_app
from headrace.gateway.vllm.routes import create_vllm_app
from headrace.server.app import create_app, create_bootstrap_app
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import bind
from headrace.server.http.server import HttpServer
from tests.gateway.site import gateway_site
from tests.server.fakes import FakeLink, running, tiny_tokenizer

NAMES = ("api", "bootstrap", "gateway for vLLM", "gateway for SGLang")


@contextmanager
def all_apps(keep_alive_s: float = 60, **changes: Any) -> Iterator[dict[str, int]]:
    """Their ports, by NAMES. changes: of their configurations."""
    found: Future[dict[str, int]] = Future()
    stops: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        with pytest.MonkeyPatch.context() as monkeypatch:
            async with AsyncExitStack() as stack:
                service = await stack.enter_async_context(running(FakeLink(), tiny_tokenizer(), **changes))
                site = await stack.enter_async_context(gateway_site(monkeypatch, **changes))
                sglang = SglangGateway(GatewayConfig(decode_engine="sglang", **changes))
                apps = (
                    create_app(service),
                    create_bootstrap_app(service),
                    create_vllm_app(site.gateway),
                    create_sglang_app(sglang),
                )
                found.set_result(
                    {
                        name: await stack.enter_async_context(_served(app, keep_alive_s))
                        for name, app in zip(NAMES, apps, strict=True)
                    }
                )
                await stop.wait()
                await sglang.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield found.result(timeout=60)
    finally:
        stops[0]()
        thread.join()


@asynccontextmanager
async def _served(app: FastAPI, keep_alive_s: float) -> AsyncIterator[int]:
    (listener,) = bind("127.0.0.1", 0, "port")
    server = HttpServer(app, HttpConnections(100), keep_alive_s)
    serving = asyncio.create_task(server.serve([listener]))
    await server.listens.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()
        await serving


@dataclass(frozen=True)
class Answer:
    """One answer of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def same(self) -> tuple[int, bytes]:
        """What does not change between two answers to the same request."""
        return self.status, self.body


def talk(port: int, *parts: bytes, pause_s: float = 0.05) -> bytes:
    """Send parts as segments of their own; all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        came = b""
        with suppress(ConnectionError):
            for number, part in enumerate(parts):
                if number:
                    connection.settimeout(pause_s)
                    with suppress(TimeoutError):
                        came += connection.recv(1 << 16)
                    connection.settimeout(20)
                connection.sendall(part)
            while part := connection.recv(1 << 16):
                came += part
        return came


def answers(came: bytes, *methods: str) -> list[Answer]:
    """What came, as answers; interim ones, too. methods: of the requests, where they are not GET."""
    wire = _Wire(came)
    found = []
    while wire.tell() < len(came):
        interim = came[wire.tell() :].startswith(b"HTTP/1.1 1")
        if interim:
            head = came[wire.tell() :].partition(b"\r\n\r\n")[0]
            wire.seek(wire.tell() + len(head) + 4)
            found.append(Answer(int(head.split()[1]), {}, b""))
            continue
        final = sum(each.status >= 200 for each in found)
        response = HTTPResponse(wire, method=methods[final] if final < len(methods) else "GET")  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        found.append(Answer(response.status, headers, response.read()))
    return found


class _Wire(io.BytesIO):
    """A socket for http.client that stays open between two answers."""

    def makefile(self, _mode: str) -> "_Wire":
        return self

    def close(self) -> None:
        pass
