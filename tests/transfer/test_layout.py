"""The copies between two sides against a twin that moves the keys or values of one token, layer and head at a time."""

from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core.geometry import Geometry
from tests.transfer.harness import random_store
from tests.transfer.ranks import assemble, sides
from transfer.arrays import ArrayPageStore
from transfer.layout import Box, box_in, copies, frame_shape, frames_of, overlap, pages_for

SIZES = st.one_of(st.integers(1, 9), st.sampled_from([16, 32, 64, 128]), st.integers(1, 128))
RANGES = st.tuples(st.integers(0, 200), st.integers(0, 160))
GEOMETRY = Geometry("float16", layers=2, kv_heads=2, head_dim=3, page_size=4)


@given(SIZES, RANGES)
def test_pages_for_counts_the_pages_that_positions_touch(page_size: int, span: tuple[int, int]) -> None:
    start, count = span
    assert pages_for(page_size, start, count) == len({p // page_size for p in range(start, start + count)})


@given(SIZES, SIZES, RANGES)
def test_copies_name_every_position_once_and_in_order(
    source_size: int, destination_size: int, span: tuple[int, int]
) -> None:
    start, count = span
    plan = copies(replace(GEOMETRY, page_size=source_size), replace(GEOMETRY, page_size=destination_size), start, count)
    taken = [
        (start // source_size + copy.source_page) * source_size + copy.source_slot + i
        for copy in plan
        for i in range(copy.count)
    ]
    put = [
        (start // destination_size + copy.page) * destination_size + copy.slot + i
        for copy in plan
        for i in range(copy.count)
    ]
    assert taken == put == list(range(start, start + count))
    frames = frames_of(plan)
    assert [frame.page for frame in frames] == list(range(pages_for(source_size, start, count)))
    held = Counter({frame.page: frame.count for frame in frames})
    assert held == Counter(p // source_size - start // source_size for p in range(start, start + count))


def move(
    sources: list[Geometry], sent: list[ArrayPageStore], src_pages: list[int],
    destinations: list[Geometry], received: list[ArrayPageStore], dst_pages: list[int], start: int, count: int,
) -> int:  # fmt: skip
    """What senders and receivers do, without sockets: the payload of each pair of ranks as bytes. Returns their sum."""
    moved = 0
    for (source, store), (destination, target) in product(
        zip(sources, sent, strict=True), zip(destinations, received, strict=True)
    ):
        plan, part = copies(source, destination, start, count), overlap(source, destination)
        if part is None:
            assert plan == []
            continue
        cuts = frames_of(plan)
        payload = [store.read(src_pages[cut.page], cut.slot, cut.count, box_in(source, part)).tobytes() for cut in cuts]
        assert [len(data) for data in payload] == [cut.count * part.token_bytes for cut in cuts]
        moved += sum(map(len, payload))
        for copy in plan:
            cut = cuts[copy.source_page]
            block = np.frombuffer(payload[copy.source_page], np.uint8).reshape(frame_shape(part, cut.count))
            tokens = block[:, :, :, copy.source_slot - cut.slot : copy.source_slot - cut.slot + copy.count]
            target.write(dst_pages[copy.page], copy.slot, copy.count, tokens, copy.destination)
    return moved


@settings(max_examples=150, deadline=None)
@given(st.data(), SIZES, SIZES, RANGES, st.randoms(use_true_random=False))
def test_bytes_land_where_copying_element_by_element_puts_them(
    data: st.DataObject, source_size: int, destination_size: int, span: tuple[int, int], random: Random
) -> None:
    """PP and TP up to 8 on both sides, split anyhow; page sizes up to 128, up to 16 heads, any range of tokens."""
    start, count = span
    layers, heads = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 16))
    sources = data.draw(sides(layers, heads, source_size))
    destinations = data.draw(sides(layers, heads, destination_size))
    needed = pages_for(source_size, start, count), pages_for(destination_size, start, count)
    src_pages, dst_pages = (random.sample(range(n + 2), n) for n in needed)
    sent = [random_store(rank, needed[0] + 2, seed=i) for i, rank in enumerate(sources)]
    received = [random_store(rank, needed[1] + 2, seed=100 + i) for i, rank in enumerate(destinations)]
    whole, expected = assemble(sent, sources), assemble(received, destinations)

    for position, layer, kind, head in product(range(start, start + count), range(layers), range(2), range(heads)):
        page = dst_pages[position // destination_size - start // destination_size]
        origin = src_pages[position // source_size - start // source_size]
        row = whole[origin, layer, kind, head, position % source_size]
        expected[page, layer, kind, head, position % destination_size] = row

    moved = move(sources, sent, src_pages, destinations, received, dst_pages, start, count)
    assert moved == count * layers * 2 * heads * sources[0].head_dim * sources[0].item_bytes
    assert np.array_equal(assemble(received, destinations), expected)


def test_ranks_that_repeat_heads_each_get_all_of_theirs() -> None:
    source = replace(GEOMETRY, kv_heads=4)
    destinations = [replace(GEOMETRY, page_size=3, head_start=start) for start in (0, 0, 2, 2)]
    sent, received = random_store(source, 4), [random_store(rank, 4, seed=i) for i, rank in enumerate(destinations)]
    moved = move([source], [sent], [3, 1], destinations, received, [2, 0], 1, 5)
    assert moved == 2 * 5 * source.token_bytes
    for one, other in ((0, 1), (2, 3)):
        for page in (2, 0):
            filled = slice(1, 3) if page == 2 else slice(0, 3)
            assert np.array_equal(received[one].data[page, ..., filled, :], received[other].data[page, ..., filled, :])
    assert np.array_equal(received[3].data[2, :, :, :, 1], sent.data[3, :, :, 2:, 1])


def test_a_full_page_is_read_without_a_copy_and_a_part_of_it_with_one() -> None:
    store = random_store(GEOMETRY, 2)
    assert np.shares_memory(store.read(1, 0, 4), store.data)
    assert np.shares_memory(store.read(1, 0, 4, box_in(GEOMETRY, GEOMETRY)), store.data)
    assert np.shares_memory(store.read(1, 0, 4, Box(slice(1, 2), slice(0, 2))), store.data)
    assert not np.shares_memory(store.read(1, 0, 4, Box(slice(0, 2), slice(1, 2))), store.data)
    assert not np.shares_memory(store.read(1, 0, 3), store.data)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((0, 4, 0, 8), (3, 5, 0, 8), (3, 1, 0, 8)),
        ((0, 9, 0, 8), (3, 5, 2, 4), (3, 5, 2, 4)),
        ((4, 2, 0, 4), (3, 5, 2, 6), (4, 2, 2, 2)),
        ((0, 3, 0, 8), (3, 5, 0, 8), None),
        ((8, 2, 0, 8), (3, 5, 0, 8), None),
        ((0, 9, 0, 2), (3, 5, 2, 2), None),
        ((0, 9, 4, 2), (3, 5, 2, 2), None),
    ],
)
def test_two_ranks_share_the_layers_and_heads_that_both_own(
    one: tuple[int, ...], other: tuple[int, ...], common: tuple[int, ...] | None
) -> None:
    def rank(page_size: int, layer_start: int, layers: int, head_start: int, kv_heads: int) -> Geometry:
        return Geometry("float16", layers, kv_heads, 3, page_size, layer_start, head_start)

    assert overlap(rank(8, *one), rank(4, *other)) == (rank(8, *common) if common else None)
    assert bool(copies(rank(8, *one), rank(4, *other), 3, 9)) == (common is not None)
