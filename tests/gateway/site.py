"""A gateway between a scripted decode engine and a scripted prefill server, both on real sockets. The peer and the
exporter, which need both sides' real protocols, are scripted, too; tests/gateway/vllm_nixl has the real ones."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace.core.config import GatewayConfig
from headrace.core.messages.frontend import AddPrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.stats import Stats
from headrace.core.types.requests.request import FirstToken
from headrace.gateway.vllm import gateway as gateway_module
from headrace.gateway.vllm.assembly import Parts
from headrace.gateway.vllm.gateway import VllmGateway
from headrace.gateway.vllm.handoff import Handoffs
from headrace.gateway.vllm.kv_loads import KvLoads
from headrace.gateway.vllm.routes import create_vllm_app
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine
from headrace.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    Loaded,
    LoadFailed,
    LoadKv,
)
from headrace.peer.thread import PeerFailed
from headrace.server.frontend.generation.prefill_failover import PrefillFailover
from headrace.server.upstream.prefill_pool import PrefillPool
from tests.gateway.vllm_nixl.scripted_engine import ScriptedEngine
from tests.server.fakes import listening_app

PAGES = 4
BLOCK = 128
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
HANDOFF = {"protocol": [1], "instance": "a" * 32, "control_port": 5001, "fingerprint": "f", "model": "smollm2"}


class ScriptedPeer:
    """A peer thread whose loads end as script says; None: they do not."""

    def __init__(self) -> None:
        self.commands: list[AnyCommand] = []
        self.script: Callable[[LoadKv], AnyResult | None] = lambda load: Loaded(
            id=load.id, at=BLOCK, start=0, count=load.tokens, first=FirstToken(7, load.tokens, 3), seconds=0.1
        )
        self._results: queue.SimpleQueue[AnyResult | None] = queue.SimpleQueue()

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._results.put(None)

    def submit(self, *commands: AnyCommand) -> None:
        self.commands += commands
        for command in commands:
            if isinstance(command, AddPrefill):
                self._results.put(PrefillState(name=command.name, up=True))
            if isinstance(command, LoadKv) and (result := self.script(command)) is not None:
                self._results.put(result)

    def results(self, wait_s: float) -> list[AnyResult]:
        result = self._results.get(timeout=wait_s)
        if result is None:
            raise PeerFailed("the peer was stopped")
        return [result]

    def loads(self) -> list[LoadKv]:
        return [command for command in self.commands if isinstance(command, LoadKv)]

    def cancelled(self) -> list[str]:
        return [command.id for command in self.commands if isinstance(command, CancelLoad)]


class RecordingExporter:
    """What was offered and withdrawn."""

    def __init__(self) -> None:
        self.offers: list[tuple[str, int, int, int]] = []
        self.withdrawn: list[str] = []
        self.gone: list[tuple[str, list[str]]] = []
        self.served: list[list[str]] = []
        """Compatibility hashes of the engines that were there."""

    def serve(self, engines: Iterable[DecodeEngine]) -> None:
        self.served.append([engine.compatibility_hash for engine in engines])

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def offer(self, load: str, first_page: int, tokens: int, jobs: int = 1) -> dict[str, Any]:
        self.offers.append((load, first_page, tokens, jobs))
        return {"do_remote_prefill": True, "remote_num_tokens": tokens}

    def withdraw(self, load: str) -> None:
        self.withdrawn.append(load)

    def engine_gone(self, agent: str, others: list[str]) -> None:
        self.gone.append((agent, others))

    def statistics(self) -> Stats:
        return Stats()


class Pool:
    pages = PAGES
    staging = None
    closed = False

    def close(self) -> None:
        self.closed = True


class Site:
    """A gateway, what is on both sides of it, and a client."""

    def __init__(self, gateway: VllmGateway, decode: ScriptedEngine, prefills: list[ScriptedEngine]) -> None:
        self.gateway = gateway
        self.decode = decode
        self.prefills = prefills
        self.peer = ScriptedPeer()
        self.exporter = RecordingExporter()
        self.http = httpx.AsyncClient()

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"kv_transfer_params": ASKED, **body})

    def prompts(self) -> list[dict[str, Any]]:
        """Bodies of POST /v1/prefill."""
        return [body for prefill in self.prefills for path, body in prefill.posts if path == "/v1/prefill"]

    async def posted(self, count: int) -> list[dict[str, Any]]:
        """Likewise, once there are so many: a prompt is posted while its KV is loaded."""
        while len(self.prompts()) < count:
            await asyncio.sleep(0.01)
        return self.prompts()

    async def count(self, series: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"headrace_{series} "))


def scripted_prefill(more: dict[str, Any]) -> ScriptedEngine:
    server = ScriptedEngine()
    server.answers = {"/v1/handoff": (200, HANDOFF | more), "/v1/prefill": (200, {})}
    return server


@asynccontextmanager
async def gateway_site(
    monkeypatch: pytest.MonkeyPatch,
    *,
    servers: int = 1,
    start: bool = True,
    handoff: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Site]:
    """A gateway that is ready, unless start is False. handoff: what its prefill servers say besides."""
    decode, prefills = ScriptedEngine(), [scripted_prefill(handoff or {}) for _ in range(servers)]
    decode.answers["/tokenize"] = (200, {"tokens": [5, 6, 7], "count": 3, "max_model_len": 4096})
    host, port = decode.side_channel
    config = GatewayConfig(
        decode=(f"{decode.url}={host}:{port}",),
        prefill=tuple(server.url for server in prefills),
        **{"model_check": False, "drain_timeout_s": 1.0, "routing": "least-load", **changes},
    )
    gateway = VllmGateway(config)
    site = Site(gateway, decode, prefills)

    def assemble(config: Any, engine: Any, served: Any, clock: Any, metrics: Any, fail: Callable[[str], None]) -> Parts:
        assert served.fingerprint == "f"
        pool: Any = Pool()
        peer: Any = site.peer
        exporter: Any = site.exporter
        loads = KvLoads(peer, lambda state: found.update(state), fail)
        found = PrefillPool(
            config.prefill,
            config.prefill_api_key,
            peer.submit,
            routing=config.routing,
            compares=config.remote == "cost",
        )
        sizes = {"page_tokens": BLOCK, "max_model_len": engine.max_model_len, "pages": PAGES}
        handoffs = Handoffs(found, PrefillFailover(found, metrics, clock), loads, exporter, clock, **sizes)
        return Parts(engine, pool, exporter, loads, found, handoffs)

    monkeypatch.setattr(gateway_module, "assemble", assemble)
    try:
        async with listening_app(create_vllm_app(gateway)) as url:
            site.http = httpx.AsyncClient(base_url=url)
            if start:
                await gateway.start()
            try:
                yield site
            finally:
                await site.http.aclose()
                await gateway.stop()
    finally:
        for server in (decode, *prefills):
            server.close()


def failing(code: str, message: str = "because") -> Callable[[LoadKv], AnyResult]:
    return lambda load: LoadFailed(id=load.id, code=code, message=message)
