"""What a vLLM 0.32 with SmolLM2 in float32 answered to a probe: a recording with addresses of zero."""

from typing import Any

import msgspec

from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.vllm_nixl.engine_probe import DecodeEngine
from headrace.gateway.vllm_nixl.wire import AgentMetadata

AGENT = "1b5442da-d1aa-479a-be40-621a4320e43a"
MODEL = "/tmp/core/model"
LAYERS, HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 128
HASH = "c8e5910bce81ac858a105f5b3c81963fa61b9869f2b0b230945caf3b4faf7657"


def agent_blob(name: str = AGENT) -> bytes:
    return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|Conns" + bytes(8)


def metadata(**changes: Any) -> AgentMetadata:
    block = HEADS * BLOCK * 2 * HEAD_DIM * 4
    fields: dict[str, Any] = {
        "engine_id": "29814892-d5eb-4a39-915f-2dfc94bb3405",
        "agent_metadata": agent_blob(),
        "kv_caches_base_addr": (0,) * LAYERS,
        "device_id": 0,
        "num_blocks": 182,
        "block_lens": (block,) * LAYERS,
        "block_strides": (block,) * LAYERS,
        "kv_cache_layout": "LBHNC",
        "block_size": BLOCK,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "CPU_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": (182,) * LAYERS,
        "region_group_ids": (0,) * LAYERS,
        "region_names": tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)),
        "region_mem_types": ("DRAM",) * LAYERS,
    }
    return AgentMetadata(**(fields | changes))


def engine(**changes: Any) -> DecodeEngine:
    made = DecodeEngine(
        url="http://127.0.0.1:8000",
        side_channel=("127.0.0.1", 5600),
        engine_id="29814892-d5eb-4a39-915f-2dfc94bb3405",
        agent=AGENT,
        vllm_version="0.32.0",
        model=MODEL,
        served_names=("smollm2",),
        adapters=(),
        max_model_len=4096,
        geometry=Geometry("float32", LAYERS, HEADS, HEAD_DIM, BLOCK),
        compatibility_hash=HASH,
        metadata=metadata(),
    )
    return msgspec.structs.replace(made, **changes)
