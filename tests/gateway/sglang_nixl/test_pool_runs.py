"""Whether a decode rank's memory fits, and the bytes that go to it, against a copy element by element."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.core.types.kv.geometry import Component, Geometry
from headrace.gateway.sglang_nixl.decode_rank import DecodeRank, RankWrite, fit, why_unfit
from headrace.gateway.sglang_nixl.pool_runs import PoolRuns
from headrace.gateway.sglang_nixl.wire import Registration, RoomTarget, parse
from headrace.transfer.backends.strided_pool import StridedPool
from tests.gateway.sglang_nixl import decode_frames
from tests.gateway.sglang_nixl.decode_frames import DIM, HEADS, LAYERS, PAGE, PAGE_BYTES

GEOMETRY = Geometry("float32", LAYERS, HEADS, DIM, PAGE)
POOL_PAGES, THEIR_PAGES = 9, 20


def registration(**changes: Any) -> Registration:
    message = parse(decode_frames.registration(**changes))
    assert isinstance(message, Registration)
    return message


def target(pages: list[int], prefix: int = 0, aux_index: int = 5) -> RoomTarget:
    message = parse(decode_frames.room(7, pages, prefix=prefix, aux_index=aux_index))
    assert isinstance(message, RoomTarget)
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": range(4)}, "4 KV buffers at the decode engine, 6 here"),
        ({"kv": range(8)}, "8 KV buffers at the decode engine, 6 here"),
        ({"page_bytes": PAGE_BYTES // 2}, f"a page has {PAGE_BYTES // 2} bytes .* {PAGE_BYTES} here .page size 16"),
        ({"tp_size": 3, "page_bytes": PAGE_BYTES}, "tp rank 0 of 3 for 4 KV heads"),
        ({"tp_size": 8, "page_bytes": PAGE_BYTES // 8}, "tp rank 0 of 8 for 4 KV heads"),
        ({"tp_rank": 1}, "tp rank 1 of 1"),
        ({"kind": "FILE"}, "FILE; served are DRAM or VRAM"),
        ({"aux": range(12)}, "12 metadata buffers"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(registration(**changes), GEOMETRY)


def test_latents_are_refused() -> None:
    latent = msgspec.structs.replace(
        GEOMETRY, layers=0, components=(Component("latent", "float32", 2, 1, 64, planes=1),)
    )
    with pytest.raises(ValueError, match="keys and values alone"):
        PoolRuns(latent, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, [3]), (16, [3]), (17, [3, 4]), (75, [7, 2, 3, 4, 19]), (80, [0, 1, 2, 3, 4])]
)
def test_runs_are_the_copy_of_every_element(ranks: int, tokens: int, pages: list[int]) -> None:
    first_page, rng = 3, np.random.default_rng(tokens)
    runs = PoolRuns(GEOMETRY, POOL_PAGES)
    pool = rng.integers(1, 256, runs.layout.bytes, np.uint8)
    kv = StridedPool(GEOMETRY, runs.layout, pool).data  # [pages, layers, K/V, heads, tokens of a page, bytes]
    for rank in range(ranks):
        heads = HEADS // ranks
        theirs = np.zeros((2, LAYERS, THEIR_PAGES, PAGE, heads, DIM * 4), np.uint8)
        expected = theirs.copy()
        for token in range(tokens):
            page, slot = divmod(token, PAGE)
            for head in range(heads):
                source = kv[first_page + page, :, :, rank * heads + head, slot]  # [layers, K/V, bytes]
                expected[:, :, pages[page], slot, head] = source.transpose(1, 0, 2)
        size = PAGE_BYTES // ranks
        places = [index * THEIR_PAGES * size for index in range(2 * LAYERS)]
        fitted = fit(registration(kv=places, tp_size=ranks, tp_rank=rank, page_bytes=size), GEOMETRY)
        memory = theirs.reshape(-1)
        found = runs.kv(RankWrite(fitted, target(pages)), first_page, tokens)
        for here, there, length in zip(*found, strict=True):
            memory[there : there + length] = pool[here : here + length]
        np.testing.assert_array_equal(theirs, expected)
        if ranks == 1:
            separate = 1 + np.count_nonzero(np.diff(pages) != 1)
            assert len(found.here) == 2 * LAYERS * separate, "pages that follow each other are one run"


def test_a_metadata_row_goes_to_its_index_in_every_buffer() -> None:
    runs = PoolRuns(GEOMETRY, POOL_PAGES)
    high = 1 << 63  # addresses may have the highest bit
    rank = fit(registration(aux=[high + 10_000 * n for n in range(10)]), GEOMETRY)
    here, there, lengths = runs.aux(RankWrite(rank, target([3], aux_index=5)), 2)
    assert lengths.tolist() == [64, 64, 64, 64, 512, 512, 64]
    starts = [
        high + 10_000 * buffer + 5 * length
        for buffer, length in zip([0, 1, 2, 3, 4, 5, 9], lengths.tolist(), strict=True)
    ]
    assert there.astype(np.uint64).tolist() == starts
    row = runs.row(2)
    assert here[0] == row.start >= PAGE_BYTES * 2 * LAYERS * POOL_PAGES
    assert here[-1] + 64 <= row.stop <= runs.row(3).start
    assert runs.row(POOL_PAGES - 1).stop == runs.layout.bytes


def write(pages: list[int], prefix: int = 0, rank: DecodeRank | None = None) -> RankWrite:
    return RankWrite(rank or fit(registration(), GEOMETRY), target(pages, prefix))


@pytest.mark.parametrize(
    ("writes", "tokens", "message"),
    [
        ([write([1, 2])], 32, ""),
        ([write([1, 2])], 17, ""),
        ([write([2], 16)], 32, ""),
        ([write([], 32)], 32, ""),
        ([write([1, 2])], 33, "names 2 pages; the prompt's 33 tokens after 0 need 3 of 16"),
        ([write([1, 2])], 16, "names 2 pages; the prompt's 16 tokens after 0 need 1 of 16"),
        ([write([1], 8)], 16, "has 8 tokens of 16, with pages of 16"),
        ([write([], 48)], 32, "has 48 tokens of 32"),
        ([write([1, 100])], 32, "page 100 of the decode engine's 100"),
        ([write([1, 2]), write([2], 16)], 32, r"the decode ranks have \[0, 16\] tokens"),
        ([], 32, r"the decode ranks have \[\] tokens"),
    ],
)
def test_pages_have_to_be_those_of_the_prompt(writes: list[RankWrite], tokens: int, message: str) -> None:
    found = why_unfit(writes, tokens, PAGE)
    assert re.search(message, found) if message else found == ""
