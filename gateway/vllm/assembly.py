"""Makes the parts of a gateway whose decode engines are known: pool, exporter, peer, prefill servers, handoffs."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.core.config import GatewayConfig, TransferConfig
from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.backends import CUDA_IPC, NIXL, SHM, ZMQ
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.gateway.pool_size import with_pool
from headrace.gateway.prefill_servers import HandoffModel
from headrace.gateway.vllm.handoff import Handoffs
from headrace.gateway.vllm.kv_loads import KvLoads
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine
from headrace.gateway.vllm_nixl.kv_pool import VllmPool
from headrace.peer.records import PeerLimits
from headrace.peer.thread import PeerThread
from headrace.server.frontend.generation.prefill_failover import PrefillFailover
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.transfer.sockets.curve_keys import known_servers

if TYPE_CHECKING:
    from headrace.gateway.vllm_nixl.exporter import KvExporter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a gateway consists of once its decode engines are known."""

    engine: DecodeEngine
    pool: VllmPool
    exporter: "KvExporter"
    loads: KvLoads
    prefills: PrefillPool
    handoffs: Handoffs

    def start(self) -> None:
        """Start the threads, and connect to the prefill servers."""
        self.exporter.start()
        self.loads.start()
        self.prefills.start()

    async def stop(self) -> None:
        """End prompts, connections and threads; the pool cannot be read afterwards."""
        await self.prefills.stop()
        await asyncio.to_thread(self.loads.stop)
        await asyncio.to_thread(self.exporter.stop)
        self.pool.close()


def assemble(
    config: GatewayConfig,
    engine: DecodeEngine,
    served: HandoffModel,
    clock: Clock,
    metrics: FrontMetrics,
    on_failure: Callable[[str], None],
) -> Parts:
    """Make all parts; nothing is started. on_failure: told in the event loop that a thread has ended, and why. Raises
    ConfigError for ports and memory that cannot be had."""
    loop = asyncio.get_running_loop()
    geometry = engine.geometry
    transfer = _transfer(config)
    pool = _pool(config, engine, transfer)

    def release(load: str) -> None:
        """On the exporter's thread."""
        loads.release(load)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(handoffs.released, load)

    try:
        exporter = _exporter(config, engine, pool, release)
    except OSError as error:
        pool.close()
        raise ConfigError(f"NIXL cannot be used: {error}") from error
    keys = known_servers(config.curve_key, config.curve_server_keys)
    limits = PeerLimits(
        fingerprint=served.fingerprint or "",
        model=engine.served_names[0],
        rules=allowed_prefills(config.prefill, ()),
        pages=pool.pages,
        page_tokens=geometry.page_size,
        server_keys=keys,
    )
    peer = PeerThread(
        limits,
        pool.staging,
        name=f"{socket.gethostname()}:{config.port} (gateway {os.getpid()})",
        max_model_len=engine.max_model_len,
        transfer=transfer,
    )

    loads = KvLoads(peer, lambda state: prefills.update(state), on_failure)
    prefills = PrefillPool(
        config.prefill,
        config.prefill_api_key,
        peer.submit,
        keys=keys,
        routing=config.routing,
        compares=config.remote == "cost",
        clock=clock,
    )
    handoffs = Handoffs(
        prefills,
        PrefillFailover(prefills, metrics, clock),
        loads,
        exporter,
        clock,
        page_tokens=geometry.page_size,
        max_model_len=engine.max_model_len,
        pages=pool.pages,
    )
    return Parts(engine, pool, exporter, loads, prefills, handoffs)


def _transfer(config: GatewayConfig) -> TransferConfig:
    """How KV comes. NIXL knows no encryption."""
    encrypted = TransferConfig(curve_key=config.curve_key)
    return encrypted if config.curve_key else replace(encrypted, backends=(CUDA_IPC, SHM, NIXL, ZMQ))


def _pool(config: GatewayConfig, engine: DecodeEngine, transfer: TransferConfig) -> VllmPool:
    """The pool, where --device says. Raises ConfigError for memory that is short."""
    geometry, device = engine.geometry, config.device

    def make(pages: int) -> VllmPool:
        if device == "cpu":
            return VllmPool(geometry, pages)
        from headrace.gateway.vllm.device_staging import DeviceStaging  # loads NIXL

        log.info("KV is held for decode engines in the memory of %s", device)
        return VllmPool(geometry, pages, partial(DeviceStaging, device=device, backends=transfer.backends))

    return with_pool(config, geometry, engine.max_model_len, make, device)


def _exporter(
    config: GatewayConfig, engine: DecodeEngine, pool: VllmPool, release: Callable[[str], None]
) -> "KvExporter":
    """Raises OSError if NIXL cannot be used."""
    from headrace.gateway.vllm_nixl.exporter import ExporterOptions, KvExporter  # loads NIXL

    options = ExporterOptions(
        host=config.side_channel_host,
        port=config.side_channel_port,
        lease_s=config.lease_s,
        limit_s=config.lease_limit_s,
    )
    return KvExporter(engine, pool, options, release)
