"""Where a prompt of a gateway is computed under --remote cost: the decode engines' costs, and the decision.

engines ── GET /metrics ─► EngineCost ─► dearest ─┐
        ── KV events ────►                        ├─► decide() ─► handed over, or left to the decode engine
prefill servers ── load ─► PrefillPool.forecast ──┘
"""

import asyncio

from headrace.core.runtime.background import cancel_all, keep_running
from headrace.core.runtime.clock import Clock
from headrace.core.types.requests.remote_prefill import PrefillDecision, RemoteForecast, decide, threshold_of
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.vllm.engine_costs import EngineCost, dearest
from headrace.gateway.vllm.engines import DecodeEngines, WatchedEngine
from headrace.gateway.vllm.handoff import HandoffPrompt
from headrace.peer.kv_event_follower import KvEventFollower, KvEventSource
from headrace.server.upstream.prefill_server import PrefillServer

LOOK_S = 1.0  # between two looks at the metrics of the decode engines


class PrefillPlacement:
    """Decides by costs. rate, events_port: see --decode-prefill-rate, --decode-kv-events-port."""

    def __init__(
        self,
        engines: DecodeEngines,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        page_size: int,
        rate: float,
        events_port: int,
    ) -> None:
        self._engines = engines
        self._metrics = metrics
        self._clock = clock
        self._events_port = events_port
        self._costs = {engine.url: EngineCost(page_size, rate) for engine in engines.all}
        self._used_at: dict[str, float] = {}  # when a prompt last went there, by prefill server
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look at the engines."""
        self._tasks.append(asyncio.create_task(keep_running("the look at decode engines' load", self._look)))
        for engine in self._engines.all if self._events_port else ():
            what = f"following the KV events of decode engine {engine.url}"
            self._tasks.append(asyncio.create_task(keep_running(what, self._follower(engine).run)))

    def _follower(self, engine: WatchedEngine) -> KvEventFollower:
        cost, source = self._costs[engine.url], KvEventSource(self._events_port)
        return KvEventFollower(engine.address.host, source, lambda batch: cost.apply(batch.events), cost.forget)

    async def stop(self) -> None:
        """End all tasks."""
        await cancel_all(self._tasks)

    def decide(self, prompt: HandoffPrompt, server: PrefillServer, there: RemoteForecast | None) -> PrefillDecision:
        """Where a prompt is computed for which this prefill server was chosen."""
        now = self._clock.now()
        up = [self._costs[engine.url] for engine in self._engines.all if engine.up]
        here = dearest(cost.forecast(prompt.tokens, prompt.cache_salt, now) for cost in up)
        used_at = self._used_at.setdefault(server.url, now)
        decision = decide(here, there, threshold_of(prompt.context.request_id), now - used_at)
        if decision.remote:
            self._used_at[server.url] = now
        if len(self._costs) == 1 and not self._events_port and not prompt.cache_salt:
            next(iter(self._costs.values())).sent(prompt.tokens, now)  # either way it has the prompt soon
        self._metrics.decided(decision)
        return decision

    async def _look(self) -> None:
        while True:
            for engine in self._engines.all:
                if engine.up:
                    self._costs[engine.url].take(await engine.client.metrics(), self._clock.now())
            await asyncio.sleep(LOOK_S)
