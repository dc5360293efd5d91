"""Messages of NixlConnector version 14, byte by byte."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.vllm_nixl.wire import (
    AgentMetadata,
    HandshakePayload,
    Heartbeat,
    ReadDone,
    encode_payload,
    encode_query,
    handoff_params,
    is_query,
    parse_notice,
)
from tests.gateway.vllm_nixl.engines import metadata

QUERY = bytes.fromhex("93c40c6765745f6d6574615f6d73670000")  # as vLLM 0.32 sends it


def test_a_query_is_the_bytes_that_vllm_sends() -> None:
    assert encode_query() == QUERY
    assert is_query(QUERY)


@pytest.mark.parametrize("frame", [
    b"", b"\xc1", QUERY[:-1], QUERY[:-1] + b"\x01", QUERY + bytes(300), msgspec.msgpack.encode(("get_meta_msg", 0, 0)),
    msgspec.msgpack.encode((b"get_meta_msg", 0)), msgspec.msgpack.encode((b"get_meta_msg", 1, 0)),
], ids=lambda frame: frame[:20].hex())  # fmt: skip
def test_other_frames_are_no_queries(frame: bytes) -> None:
    assert not is_query(frame)


def test_a_payload_is_a_map_of_a_hash_and_of_a_map_with_the_names_of_vllms_fields() -> None:
    sent = metadata()
    payload = msgspec.msgpack.decode(encode_payload("hash", sent))
    assert payload.keys() == {"compatibility_hash", "agent_metadata_bytes"}
    fields = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    assert list(fields) == [
        "engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens", "block_strides",
        "kv_cache_layout", "block_size", "ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block",
        "region_num_blocks", "region_group_ids", "region_names", "region_mem_types", "dcp_size", "pcp_size",
        "ple_block_len", "region_members", "packed_member_layouts",
    ]  # fmt: skip
    read = msgspec.msgpack.decode(encode_payload("hash", sent), type=HandshakePayload)
    assert msgspec.msgpack.decode(read.agent_metadata_bytes, type=AgentMetadata) == sent


def test_notices() -> None:
    assert parse_notice(b"HB:a,b") == Heartbeat(("a", "b"))
    assert parse_notice(b"HB:") == Heartbeat(())
    assert parse_notice(b"a:b:2") == ReadDone("a:b", 2)
    assert parse_notice(b"a:0") == ReadDone("a", 1)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_notice_or_nothing(notice: bytes) -> None:
    found = parse_notice(notice)
    assert found is None or isinstance(found, Heartbeat) or (found.request and found.readers >= 1)


def test_params_name_the_keys_that_a_decode_engine_looks_for() -> None:
    params = handoff_params(engine_id="e", request="r", host="h", port=5, blocks=range(3, 6), tokens=300)
    assert params == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 4, 5]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "h", "remote_port": 5, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
        "remote_num_tokens": 300, "remote_blocks_expiry_time": None, "remote_registration_generation": 1,
        "transfer_mode": "pull",
    }  # fmt: skip
