"""A gateway's state: how it starts, whether it is ready, how it drains and stops.

engines found ─► pool, peer, exporter ─► prefill servers connected ─► models compared ─► serving ─► draining
"""

import asyncio
from typing import Any

from msgspec.structs import replace

from headrace.core.config import GatewayConfig
from headrace.core.runtime.background import cancel_all, keep_running
from headrace.core.stats import Sample, Stats
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.peers.decode_address import DecodeAddress, parse_decodes
from headrace.core.version import headrace_version
from headrace.engine.device import resolve_device
from headrace.gateway.base import BaseGateway
from headrace.gateway.metrics import GatewayMetrics, in_catalog, with_prefix
from headrace.gateway.prefill_servers import find_served, wait_connected
from headrace.gateway.vllm.assembly import Parts, assemble
from headrace.gateway.vllm.engines import DecodeEngines
from headrace.gateway.vllm.front import Front
from headrace.gateway.vllm.model_check import check_models
from headrace.gateway.vllm.placement import PrefillPlacement
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine, ask_side_channel, model_card, probe
from headrace.gateway.vllm_nixl.wire import HandshakePayload
from headrace.integrations.http_client import bearer, direct_async_client
from headrace.server.telemetry.engine_gauges import EngineGauges

SCRAPE_S = 5.0  # between two looks at the metrics of the decode engines


class VllmGateway(BaseGateway):
    """A gateway for vLLM decode engines: see the module's docstring. Used by the event loop only."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a device that is not there."""
        super().__init__(replace(config, device=resolve_device(config.device)))
        self._card = model_card(config.decode_model_card)
        self._http = direct_async_client(headers=bearer(config.decode_api_key), timeout=None)
        self._engines = DecodeEngines(parse_decodes(config.decode), self._http, self._probe, _handshake)
        self._metrics = GatewayMetrics()
        self._parts: Parts | None = None
        self._front: Front | None = None
        self._placement: PrefillPlacement | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """See BaseGateway: decode engines and prefill servers."""
        config = self.config
        fingerprint = asyncio.create_task(find_served(config.prefill, config.prefill_api_key))
        try:
            engine = await self._engines.find()
            served = await fingerprint
        finally:
            fingerprint.cancel()
        self._parts = parts = assemble(config, engine, served, self.clock, self.front_metrics, self._fail)
        parts.start()
        parts.exporter.serve(self._engines.up())
        self._engines.watch(self._engine_gone, parts.exporter.serve)
        await wait_connected(parts.prefills)
        if config.model_check and self._card is None:
            await check_models(self._engines, parts.prefills.up()[0].url, config.prefill_api_key, engine.geometry.dtype)
        self.front_metrics.set_build(headrace_version(), "gateway", engine.served_names[0])
        self._tasks.append(asyncio.create_task(keep_running("the look at decode engines' metrics", self._scrape)))
        if config.remote == "cost":
            self._placement = PrefillPlacement(
                self._engines,
                self._metrics,
                self.clock,
                page_size=engine.geometry.page_size,
                rate=config.decode_prefill_rate,
                events_port=config.decode_kv_events_port,
            )
            self._placement.start()
            parts.handoffs.decide = self._placement.decide
        self._front = Front(
            self._engines,
            parts.handoffs,
            self._metrics,
            self.clock,
            served_names=engine.served_names,
            recompute=config.fallback == "recompute",
            never=config.remote == "never",
        )
        return (
            f"Headrace {headrace_version()}: gateway for {engine.served_names[0]} (vLLM {engine.vllm_version}, "
            f"{engine.geometry.dtype}, blocks of {engine.geometry.page_size} tokens)"
        )

    def require_front(self) -> Front:
        """What answers prompts. Raises HeadraceError (503) if none are answered now."""
        if (problem := self._refusal()) is not None:
            raise HeadraceError(problem)
        assert self._front is not None, "there is no refusal"
        return self._front

    def not_ready(self) -> ErrorInfo | None:
        """Why prompts would not be handed over now (503), or None."""
        if (problem := self._refusal()) is not None:
            return problem
        if self._parts is not None and (text := self._parts.prefills.problem()):
            return refusals.NO_PREFILL_SERVER.error(problem=text)
        return None

    def models(self) -> list[dict[str, Any]]:
        """Entries of GET /v1/models: names of the decode engines' model. Raises HeadraceError (503) before they are
        known."""
        self.require_front()
        assert self._parts is not None, "there is no refusal"
        engine = self._parts.engine
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "headrace",
                "root": engine.model,
                "max_model_len": engine.max_model_len,
            }
            for name in engine.served_names
        ]

    def statistics(self) -> list[Stats]:
        """What /metrics shows."""
        found = [self.front_metrics.statistics(), self._metrics.statistics()]
        gauges = [Sample("gateway_decode_engines_up", sum(engine.up for engine in self._engines.all))]
        if (parts := self._parts) is not None:
            found.append(with_prefix(parts.exporter.statistics()))
            gauges += [
                Sample("kv_pages", parts.pool.pages - parts.handoffs.leased_pages, ("free",)),
                Sample("kv_pages", parts.handoffs.leased_pages, ("leased",)),
                Sample("prefill_servers_up", len(parts.prefills.up())),
            ]
        return in_catalog((*found, Stats(tuple(gauges))))

    def engine_metrics(self) -> bytes:
        """With --metrics-names vllm. Requests that are open are running: what waits, waits at the prefill servers."""
        if self.config.metrics_names != "vllm" or (parts := self._parts) is None:
            return b""
        gauges = EngineGauges(
            running=self._open, waiting=0, leased_pages=parts.handoffs.leased_pages, pages=parts.pool.pages
        )
        return gauges.as_vllm(parts.engine.geometry.page_size, parts.engine.served_names[0])

    async def stop(self) -> None:
        """End all tasks and threads."""
        await super().stop()
        await cancel_all(self._tasks)
        if self._placement is not None:
            await self._placement.stop()
        await self._engines.stop()
        if self._parts is not None:
            await self._parts.stop()
        await self._http.aclose()

    def _in_use(self) -> bool:
        """Decode engines still read what they were told of, too."""
        return super()._in_use() or (self._parts is not None and self._parts.handoffs.leased_pages > 0)

    def _probe(self, address: DecodeAddress) -> DecodeEngine:
        """Blocking."""
        return probe(
            address.url,
            (address.host, address.port),
            api_key=self.config.decode_api_key,
            allow_untested=self.config.allow_untested,
            card=self._card,
        )

    def _refusal(self) -> ErrorInfo | None:
        """Why a request would be refused now (503), or None."""
        if (problem := self._ending()) is not None:
            return problem
        if self._front is not None:  # an engine with other values must not be offered KV, and the router chooses
            unfit = self._engines.problem()
            return refusals.NO_DECODE_ENGINE.error(problem=unfit) if unfit else None
        waiting = [f"decode engine {one.url}: {one.reason}" for one in self._engines.all if one.found is None]
        if self._parts is not None and (text := self._parts.prefills.problem()):
            waiting.append(text)
        text = "; ".join(waiting) or "prefill servers have not answered yet, or models are being compared"
        return refusals.GATEWAY_STARTING.error(waiting=f": {text}")

    def _engine_gone(self, engine: DecodeEngine) -> None:
        """The process of a decode engine has ended: it reads nothing any more."""
        assert self._parts is not None, "engines are watched once there are parts"
        self._parts.exporter.engine_gone(engine.agent, self._engines.agents())

    async def _scrape(self) -> None:
        while True:
            for engine in self._engines.all:
                if engine.up:
                    self._metrics.take_engine_metrics(engine.url, await engine.client.metrics())
            await asyncio.sleep(SCRAPE_S)


def _handshake(address: DecodeAddress) -> HandshakePayload:
    """Blocking."""
    return ask_side_channel((address.host, address.port))
