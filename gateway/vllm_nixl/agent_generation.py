"""A prefill engine as vLLM decode engines see it: a NIXL agent with an engine id and a region of the pool.

What a generation has offered can be read until it is ended, and not afterwards: its agent is destroyed and its
region retired. A decode engine that meets a new engine id at a known address does the handshake again, and lets go of
the old one when its own reads are over (_track_remote_engine_replacement in vLLM's nixl/base_worker.py).
"""

import logging
import math
import uuid
from collections.abc import Iterator

from msgspec.structs import replace

from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine
from headrace.gateway.vllm_nixl.kv_pool import VllmPool
from headrace.gateway.vllm_nixl.wire import AgentMetadata, encode_payload
from headrace.transfer.backends.nixl import ERRORS, HOST, Agent

log = logging.getLogger(__name__)

# A CPU engine keeps its cache packed for its instruction set, and packs what comes from an engine whose attention
# backend has another name. Engines on GPUs do not look at it.
BACKEND_NAME = "HEADRACE"


class AgentGeneration:
    """See the module's docstring.

    Attributes:
        number: counts generations.
        engine_id: remote_engine_id of what it offers.
        asked: when it was last sent, in seconds of the exporter's clock.
    """

    def __init__(self, number: int, engine: DecodeEngine, pool: VllmPool, devices: str) -> None:
        """engine: one of those that read from it, which are alike but for their releases. devices: network device of
        NIXL, "" for all. Raises OSError when NIXL cannot be used."""
        self.number = number
        self.engine_id = str(uuid.uuid4())
        self.asked = -math.inf
        self._region = pool.staging.region()
        try:
            self._agent = Agent(self._region.memory, devices, same_host=self._region.same_host)
        except OSError:
            self._region.retire()
            raise
        self._metadata = self._describe(engine, pool)
        self._payloads: dict[str, bytes] = {}  # by compatibility hash

    def payload(self, compatibility_hash: str) -> bytes:
        """Its answer to handshakes of engines with this hash."""
        if compatibility_hash not in self._payloads:
            self._payloads[compatibility_hash] = encode_payload(compatibility_hash, self._metadata)
        return self._payloads[compatibility_hash]

    def _describe(self, engine: DecodeEngine, pool: VllmPool) -> AgentMetadata:
        layers, device = pool.geometry.layers, self._agent.device
        return replace(
            engine.metadata,
            engine_id=self.engine_id,
            agent_metadata=self._agent.metadata(),
            kv_caches_base_addr=tuple(self._agent.address + offset for offset in pool.region_offsets),
            device_id=0 if device == HOST else device,
            num_blocks=pool.pages,
            region_num_blocks=(pool.pages,) * layers,
            region_mem_types=("DRAM" if device == HOST else "VRAM",) * layers,
            block_lens=(pool.block_bytes,) * layers,
            block_strides=(pool.block_bytes,) * layers,
            attn_backend_name=BACKEND_NAME,
        )

    def notices(self) -> Iterator[tuple[str, bytes]]:
        """(NIXL agent, notification) that have come since the last call."""
        try:
            found = self._agent.nixl.getNotifs({}, [])
        except ERRORS as error:
            log.warning("NIXL gives no notifications: %s", error)
            return
        for agent, notices in found.items():
            for notice in notices:
                yield agent, notice

    def end(self) -> None:
        """End every reader's access to what it has offered."""
        self._agent.destroy()
        self._region.retire()
