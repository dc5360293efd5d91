"""Which prefill server a gateway for SGLang posts a router's body to, and which one next."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from headrace.core.messages.frontend import AddPrefill, AnyFrontendRequest
from headrace.core.messages.replies import PrefillState
from headrace.core.runtime.clock import SystemClock
from headrace.core.types.errors import HeadraceError
from headrace.gateway.sglang.prefills import PrefillAnswer, PrefillPoster
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillPool
from tests.server.fakes import in_loop

Answer = Callable[[str], httpx.Response]
"""Of a host to a body. May raise httpx.HTTPError."""


class Servers(httpx.AsyncBaseTransport):
    """Prefill servers as an HTTP transport. bodies: host and content of those that have come."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[tuple[str, bytes]] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/handoff":
            return httpx.Response(200, json={"protocol": [1], "instance": request.url.host, "control_port": 5001})
        self.bodies.append((request.url.host, await request.aread()))
        await self.hold.wait()
        return self.answer(request.url.host)


@asynccontextmanager
async def posting(servers: Servers, count: int = 2) -> AsyncIterator[tuple[PrefillPoster, FrontMetrics]]:
    """A poster to servers p0, p1 …, which are up."""

    def post(message: AnyFrontendRequest) -> None:
        assert isinstance(message, AddPrefill)
        asyncio.get_running_loop().call_soon(pool.update, PrefillState(name=message.name, up=True))

    urls = tuple(f"http://p{number}:8000" for number in range(count))
    metrics = FrontMetrics()
    pool = PrefillPool(urls, "", post, servers, routing="least-load")
    async with httpx.AsyncClient(transport=servers) as http:
        pool.start()
        while len(pool.up()) < count:
            await asyncio.sleep(0)
        yield PrefillPoster(pool, http, metrics, SystemClock()), metrics
        await pool.stop()


async def post(poster: PrefillPoster, body: bytes = b"{}") -> PrefillAnswer:
    return await poster.post("r", "/generate", body, {})


def retries(metrics: FrontMetrics) -> float:
    return sum(sample.value for sample in metrics.statistics().samples if sample.name == "prefill_retries_total")


@in_loop
async def test_the_server_with_the_fewest_requests_gets_the_next():
    servers = Servers(lambda host: httpx.Response(200, content=host.encode()))
    servers.hold.clear()
    async with posting(servers) as (poster, _):
        asked = [asyncio.create_task(post(poster, b"%d" % number)) for number in range(4)]
        while len(servers.bodies) < 4:
            await asyncio.sleep(0)
        servers.hold.set()
        answers = await asyncio.gather(*asked)
    assert sorted(host for host, _ in servers.bodies) == ["p0", "p0", "p1", "p1"]
    for (host, body), answer in zip(sorted(servers.bodies, key=lambda one: one[1]), answers, strict=True):
        assert answer == PrefillAnswer(host, 5001, host.encode()), body


@pytest.mark.parametrize("failure", [429, 503, httpx.ConnectError("refused"), httpx.ReadError("cut")], ids=repr)
@in_loop
async def test_what_a_server_cannot_compute_goes_to_another_one(failure):
    def answer(host: str) -> httpx.Response:
        if host != servers.bodies[0][0]:
            return httpx.Response(200, content=b"done")
        if isinstance(failure, httpx.HTTPError):
            raise failure
        return httpx.Response(failure, json={"error": {"message": "not now", "code": "queue_full"}})

    servers = Servers(answer)
    async with posting(servers) as (poster, metrics):
        assert (await post(poster)).content == b"done"
        assert retries(metrics) == 1
    assert len(servers.bodies) == 2


@in_loop
async def test_what_a_server_says_of_the_request_is_the_answer():
    said = {"error": {"message": "no such field", "code": "unknown_field", "param": "nonsense", "type": "x"}}
    servers = Servers(lambda _host: httpx.Response(404, json=said))
    async with posting(servers) as (poster, metrics):
        with pytest.raises(HeadraceError, match="no such field") as raised:
            await post(poster)
        assert retries(metrics) == 0
    info = raised.value.info
    assert (info.status, info.code, info.field) == (404, "unknown_field", "nonsense")
    assert len(servers.bodies) == 1


@in_loop
async def test_overloaded_servers_say_when_to_retry():
    said = {"error": {"message": "full", "code": "queue_full"}}
    servers = Servers(lambda _host: httpx.Response(429, json=said, headers={"Retry-After": "7"}))
    async with posting(servers) as (poster, _):
        with pytest.raises(HeadraceError) as raised:
            await post(poster)
    assert (raised.value.info.status, raised.value.info.retry_after_s) == (429, 7.0)


@in_loop
async def test_a_prompt_that_ends_servers_does_not_reach_all_of_them():
    def die(_host: str) -> httpx.Response:
        raise httpx.ReadError("the server is gone")

    servers = Servers(die)
    async with posting(servers, 5) as (poster, _):
        with pytest.raises(HeadraceError) as raised:
            await post(poster)
    assert raised.value.info.status == 502
    assert len({host for host, _ in servers.bodies}) == len(servers.bodies) == 3
