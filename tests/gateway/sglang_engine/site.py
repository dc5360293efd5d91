"""Prefill servers, a gateway and stock SGLang decode engines, and the two requests that a router makes of one."""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.gateway.sglang_engine.engine import Sglang
from tests.gateway.sglang_nixl.prefill_side import HOST, bootstrap_port

PREFILL = ("--role", "prefill", "--model", "smollm2", "--max-model-len", "4096", "--threads", "1")
PAGE = 16
ROOMS_ENDED = 'headrace_gateway_rooms_ended_total{{outcome="{}"}}'
TIMEOUT_S = 180.0  # of a request: cores are shared, and what waits for ever is to fail


class Site(NamedTuple):
    """What a request goes through, but for the router, which takes the gateway for the prefill side."""

    prefills: tuple[Server, ...]
    gateway: Server
    engines: tuple[Sglang, ...]
    bootstrap_port: int
    model: str = "smollm2"

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        return (self.gateway.url,)

    @property
    def decode_urls(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self.engines)

    @property
    def engine(self) -> Sglang:
        return self.engines[0]

    def rooms(self) -> dict[str, float]:
        """Rooms that have ended, by outcome."""
        metrics = self.gateway.metrics()
        return {name: metrics[ROOMS_ENDED.format(name)] for name in ("handed_over", "aborted", "failed")}

    def named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A body with a room, as SGLang's router sends it to both sides."""
        room = random.randrange(1 << 62, 1 << 63)
        return {**body, "bootstrap_host": HOST, "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}

    def both(
        self, path: str, body: Mapping[str, Any], engine: Sglang | None = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[httpx.Response, httpx.Response]:
        """The answers of the gateway and of the engine to a body that both get at once."""
        fields = self.named(body)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, self.gateway.url, path, fields, timeout_s)
            second = post((engine or self.engine).url, path, fields, timeout_s)
            return first.result(), second

    def ask(self, path: str, body: Mapping[str, Any], engine: Sglang | None = None) -> httpx.Response:
        """The answer of the engine, once both sides have answered with 200."""
        first, second = self.both(path, body, engine)
        assert first.status_code == 200, f"{first.text}\n{second.text}\n{self.gateway.log}"
        assert second.status_code == 200, f"{second.text}\n{self.gateway.log}"
        return second

    def quiet(self) -> None:
        """Wait until nobody holds pages, and no room is open."""
        for server in self.prefills:
            if server.process.poll() is None:
                wait_until(lambda server=server: pages_in_use(server) == 0, 30, f"pages are back\n{server.log}")
        open_rooms = lambda: self.gateway.metrics()["headrace_gateway_rooms_open"]  # noqa: E731
        wait_until(lambda: open_rooms() == 0, 30, f"no room is open\n{self.gateway.log}")
        for engine in self.engines:
            if engine.process.poll() is None:
                wait_until(engine.idle, 30, f"{engine.load()}: SGLang has nothing open\n{engine.log[-3000:]}")


def post(url: str, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=dict(body), timeout=timeout_s, trust_env=False)


def gateway_flags(engines: Sequence[Sglang], prefills: Sequence[Server], port: int, page: int = PAGE) -> list[str]:
    """Flags of headrace gateway that name the servers on both sides."""
    return [
        *("--decode-engine", "sglang", "--sglang-page-size", str(page), "--bootstrap-port", str(port)),
        *(flag for engine in engines for flag in ("--decode", engine.url)),
        *(flag for server in prefills for flag in ("--prefill", server.url)),
    ]


@contextmanager
def gateway_of(
    engines: Sequence[Sglang], prefills: Sequence[Server], *flags: str, page: int = PAGE, port: int = 0, http: int = 0
) -> Iterator[Site]:
    """A gateway that is ready, between these servers. port: for engines to ask; http: of routers; free ones unless
    given."""
    port = port or bootstrap_port()
    server = Server(*gateway_flags(engines, prefills, port, page), *flags, command="gateway", port=http)
    with running(server):
        yield Site(tuple(prefills), server, tuple(engines), port)
