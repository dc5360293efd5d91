"""The metadata row, read as an SGLang decode engine reads it."""

import struct

import pytest

from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.requests.request import FirstToken, TokenLogprob
from headrace.gateway.sglang_nixl.aux_row import ROW_BYTES, aux_parts, aux_row, check_buffers

FIRST = FirstToken(42, prompt_tokens=100, cached_tokens=64, logprob=TokenLogprob(42, -0.5, (42, 7), (-0.5, -1.25)))
ROOM = (1 << 62) + 5
BUFFERS = ["output_ids", "cached_tokens", "logprob", "logprob_id", "top_logprobs", "top_ids"]
DRAFT = ["topk_p", "topk_index", "hidden_states"]
MASK = ["mask_length", "mask_ids", "mask_logprobs"]
ENGINES = {
    10: [*BUFFERS, *DRAFT, "room"],
    11: [*BUFFERS, *DRAFT, "room", "checksum"],
    13: [*BUFFERS, *MASK, *DRAFT, "room"],
    14: [*BUFFERS, *MASK, *DRAFT, "room", "checksum"],
}


@pytest.mark.parametrize("count", ENGINES)
def test_every_part_lands_in_its_buffer(count: int) -> None:
    row = aux_row(FIRST, ROOM)
    assert len(row) == ROW_BYTES
    check_buffers(count)
    landed = {ENGINES[count][part.buffer]: row[part.start : part.start + part.length] for part in aux_parts(count)}
    assert set(landed) == {*BUFFERS, "room", *(["mask_length"] if count > 11 else [])}
    words = {name: len(data) // 4 for name, data in landed.items()}
    assert words == {name: 128 if name.startswith("top_") else 16 for name in landed}
    assert struct.unpack_from("<2i", landed["output_ids"]) == (42, 0)
    assert struct.unpack_from("<5i", landed["cached_tokens"]) == (64, 64, 0, 0, 0), "in all, and on the device"
    assert struct.unpack_from("<f", landed["logprob"]) == (-0.5,)
    assert struct.unpack_from("<i", landed["logprob_id"]) == (42,)
    assert struct.unpack_from("<3f", landed["top_logprobs"]) == (-0.5, -1.25, 0.0)
    assert struct.unpack_from("<3i", landed["top_ids"]) == (42, 7, 0)
    assert struct.unpack_from("<2Q", landed["room"]) == (ROOM, 0)
    assert landed.get("mask_length", bytes(64)) == bytes(64)


def test_cached_tokens_are_told_by_tier() -> None:
    row = aux_row(FirstToken(1, prompt_tokens=9, cached_tokens=8, from_tiers=TierTokens(host=4, disk=2)), ROOM)
    assert struct.unpack_from("<5i", row, 64) == (8, 2, 4, 2, 0), "in all; device, host, storage"


def test_without_logprobs_they_are_zero_and_more_than_fit_are_cut() -> None:
    assert aux_row(FirstToken(1, 2, 3), ROOM)[128:1408] == bytes(1280)[: 1408 - 128 - 128] + aux_row(FIRST, ROOM)[1280:]
    many = TokenLogprob(1, -1.0, tuple(range(200)), (-1.0,) * 200)
    assert struct.unpack_from("<128i", aux_row(FirstToken(1, 2, 3, many), ROOM), 768)[-1] == 127


@pytest.mark.parametrize("count", [0, 9, 12, 15, 16])
def test_engines_with_other_buffers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} metadata buffers"):
        check_buffers(count)
