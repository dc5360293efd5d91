"""Wire format of vLLM's NixlConnector in pull mode, of the releases in releases.py: handshake, notices, request
parameters. Pure.

    decode engine ──Query──► side channel of the prefill side          ZMQ, REQ to ROUTER
                  ◄──HandshakePayload, clock──
    decode engine ──READ of blocks, then "<request id>:<readers>"──►   NIXL notifications
                  ──"HB:<request id>,<request id>"──►

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl/ (metadata.py, base_scheduler.py, pull_worker.py).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE

QUERY_WORD = b"get_meta_msg"
QUERY_BYTES = 256  # longest query; a real one has 16
HEARTBEAT = b"HB:"
ONLY_REGISTRATION = 1  # of an engine id: memory that is registered anew has a new one, as releases before 0.33 need it
LAYOUT = "LBHNC"  # [layer][block][head][token][keys, values], vLLM's default wherever NixlConnector is used


class AgentMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """NixlAgentMetadata of one worker: its NIXL agent, and where its KV cache lies. A region is one layer's cache."""

    engine_id: str
    agent_metadata: bytes
    """Metadata of the NIXL agent, which another agent loads."""
    kv_caches_base_addr: tuple[int, ...]
    """Address of each region."""
    device_id: int
    num_blocks: int
    block_lens: tuple[int, ...]
    """Bytes of a block in each region."""
    block_strides: tuple[int, ...]
    """Bytes from one block of a region to the next."""
    kv_cache_layout: str
    block_size: int
    """Tokens of a block."""
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: tuple[int, ...] | None = None
    region_group_ids: tuple[int, ...] | None = None
    """KV cache group of each region."""
    region_names: tuple[str, ...] | None = None
    """Layer of each region."""
    region_mem_types: tuple[str, ...] | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: tuple[tuple[str, ...], ...] = ()
    packed_member_layouts: dict[str, tuple[int, int]] = {}


class HandshakePayload(msgspec.Struct, frozen=True, kw_only=True):
    """NixlHandshakePayload: the hash is compared before the metadata is decoded."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
    """AgentMetadata in msgpack."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A decode engine still has these requests, and has not read their blocks yet."""

    requests: tuple[str, ...]


class ReadDone(msgspec.Struct, frozen=True):
    """A worker of a decode engine needs the blocks of a request no more."""

    request: str
    readers: int
    """Workers of the engine that each send this notice."""


def encode_query() -> bytes:
    """A query for the metadata of the first worker. vLLM's side channel ends when it is asked for one that it has
    not."""
    return msgspec.msgpack.encode((QUERY_WORD, 0, 0))


def is_query(frame: bytes) -> bool:
    """Whether a frame asks for the metadata of the first worker, the only one here."""
    if len(frame) > QUERY_BYTES:
        return False
    try:
        word, pipeline_rank, tensor_rank = msgspec.msgpack.decode(frame, type=tuple[bytes, int, int])
    except NO_MESSAGE:
        return False
    return (word, pipeline_rank, tensor_rank) == (QUERY_WORD, 0, 0)


def encode_payload(compatibility_hash: str, metadata: AgentMetadata) -> bytes:
    """The first frame of the answer to a query."""
    payload = HandshakePayload(
        compatibility_hash=compatibility_hash, agent_metadata_bytes=msgspec.msgpack.encode(metadata)
    )
    return msgspec.msgpack.encode(payload)


def parse_notice(notice: bytes) -> Heartbeat | ReadDone | None:
    """A notification of a decode engine; None for anything else."""
    try:
        text = notice.decode()
    except UnicodeDecodeError:
        return None
    if notice.startswith(HEARTBEAT):
        return Heartbeat(tuple(name for name in text[len(HEARTBEAT) :].split(",") if name))
    request, _, readers = text.rpartition(":")
    if not request or not readers.isascii() or not readers.isdigit() or len(readers) > 6:
        return None
    return ReadDone(request, max(1, int(readers)))


def handoff_params(
    *, engine_id: str, request: str, host: str, port: int, blocks: Sequence[int], tokens: int
) -> dict[str, Any]:
    """kv_transfer_params of a prompt whose KV lies in these blocks, as a prefill engine of vLLM answers them.

    blocks: exactly ceil(tokens / block size) of them. With fewer the decode engine's core ends, with more it uses the
    wrong ones.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": ONLY_REGISTRATION,
        "transfer_mode": "pull",
    }
