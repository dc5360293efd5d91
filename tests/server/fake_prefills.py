"""Prefill servers as an HTTP transport, for the front end of a decode server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from headrace.core.messages.frontend import AddPrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, PrefillState
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, reserving, running, saying

ONE, TWO = "http://p1:8001", "http://p2:8001"
ANSWER = {
    "timing_ms": {"queue": 1.0, "bootstrap": 2.0, "forward": 30.0, "transfer": 4.0, "total": 37.0},
    "prompt_logprobs": None,
}


class _Endless(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536


class Prefills(httpx.AsyncBaseTransport):
    """Prefill servers as an HTTP transport. answer: returns the response to a prompt. posts: prompts received."""

    def __init__(self, answer: Callable[[dict[str, Any]], httpx.Response] | None = None) -> None:
        self.answer = answer or (lambda _body: httpx.Response(200, json=ANSWER))
        self.control_ports = {"p1": 5001, "p2": 5002}
        self.instance = "a" * 32
        self.posts: list[tuple[str, dict[str, Any], httpx.Headers]] = []
        self.more: dict[str, Any] = {}
        self.discoveries = 0
        self.wants_key = ""
        self.flood = False  # GET /v1/handoff never ends
        self.keys: list[tuple[str, str | None]] = []  # path and Authorization of every request
        self.hold = asyncio.Event()
        self.hold.set()
        self.posted = asyncio.Event()
        self.dropped = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host not in self.control_ports:
            raise httpx.ConnectError("connection refused", request=request)
        self.keys.append((request.url.path, request.headers.get("Authorization")))
        if request.url.path == "/query":
            worker = {
                "engine_id": self.instance,
                "worker_addr": {"0": {"0": f"tcp://{host}:{self.control_ports[host]}"}},
            }
            return httpx.Response(200, json={"0": worker})
        if self.wants_key and self.keys[-1][1] != f"Bearer {self.wants_key}":
            return httpx.Response(401)
        if request.url.path == "/v1/handoff":
            self.discoveries += 1
            if self.flood:
                return httpx.Response(200, stream=_Endless())
            found = {
                "protocol": [1],
                "instance": self.instance,
                "control_port": self.control_ports[host],
                "model": "tiny",
            }
            return httpx.Response(200, json=found | self.more)
        assert request.url.path == "/v1/prefill"
        body = msgspec.json.decode(await request.aread())
        self.posts.append((host, body, request.headers))
        self.posted.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.dropped.set()
            raise
        return self.answer(body)


def welcoming(link: FakeLink, *urls: str) -> None:
    """Have the scheduler report that these servers are up."""
    for url in urls:
        link.say(PrefillState(name=url, up=True))


async def until_ready(http: httpx.AsyncClient) -> None:
    while (await http.get("/ready")).status_code != 200:
        await asyncio.sleep(0)


def fetched(tokenizer: Tokenizer, text: str = "hello") -> Callable[[FakeLink, Submit], list[AnySchedulerReply]]:
    """A script: Reserved, then tokens, as if the KV had come."""

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        return [*reserving(link, submit), *saying(tokenizer, text)(link, submit)]

    return script


@asynccontextmanager
async def decode(
    link: FakeLink, tokenizer: Tokenizer, prefills: Prefills | None = None, *, up: bool = True, **server: Any
) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """A decode server with one configured prefill server, which is up."""
    fields = {"prefill": (ONE,), **server}
    async with (
        running(link, tokenizer, role="decode", prefill_transport=prefills or Prefills(), **fields) as service,
        client(service) as http,
    ):
        if fields["prefill"]:
            await link.wait_for(AddPrefill)
            if up:
                welcoming(link, ONE)
                await until_ready(http)
        yield service, http
