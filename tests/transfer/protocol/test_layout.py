"""The copies between two sides against a twin that moves the keys or values of one token, layer and head at a time."""

from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.data.payload import Passage, frames, write_frames
from headrace.transfer.protocol.layout import Box, box_in, carried, copies, overlap, pages_for
from tests.transfer.harness import gather, random_store
from tests.transfer.ranks import assemble, sides, with_components

SIZES = st.one_of(st.integers(1, 9), st.sampled_from([16, 32, 64, 128]), st.integers(1, 128))
RANGES = st.tuples(st.integers(0, 200), st.integers(0, 160))
GEOMETRY = Geometry("float16", layers=2, kv_heads=2, head_dim=3, page_size=4)
DRAFT = st.builds(
    Component, st.just("draft"), st.just("float16"), st.integers(1, 3), st.integers(1, 8), st.integers(1, 3)
)
LATENT = st.builds(
    Component, st.just("latent"), st.just("float32"), st.integers(1, 8), st.just(1), st.integers(1, 5), st.just(1)
)
SCALES = st.builds(
    Component, st.just("scales"), st.just("uint8"), st.integers(1, 2), st.integers(1, 4), st.just(1), st.integers(1, 3)
)
COMPONENTS = st.lists(st.one_of(DRAFT, LATENT, SCALES), max_size=3, unique_by=lambda component: component.name)


def ranks(layers: int, heads: int, page_size: int) -> st.SearchStrategy[list[Geometry]]:
    """A side; without keys and values where there are no layers."""
    bare = [Geometry("float16", 0, 0, 1, page_size)]
    return sides(layers, heads, page_size) if layers else st.just(bare)


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
    cuts = [frame for frame, _ in carried(plan)]
    assert [frame.page for frame in cuts] == list(range(pages_for(source_size, start, count)))
    held = Counter({frame.page: frame.count for frame in cuts})
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
        passage = Passage(source, destination, start, count)
        plan, part = copies(*passage), overlap(source, destination)
        if part is None:
            assert plan == []
            continue
        buffers = [memoryview(frame.tobytes()) for frame in frames(store, passage, src_pages)]
        assert [frame.bytes for frame, _ in carried(plan)] == [len(buffer) for buffer in buffers]
        assert sum(map(len, buffers)) == count * part.token_bytes
        write_frames(target, copies(part, destination, start, count), dst_pages, buffers)
        moved += sum(map(len, buffers))
    return moved


@settings(max_examples=150, deadline=None)
@given(st.data(), SIZES, SIZES, RANGES, st.randoms(use_true_random=False))
def test_bytes_land_where_copying_element_by_element_puts_them(
    data: st.DataObject, source_size: int, destination_size: int, span: tuple[int, int], random: Random
) -> None:
    """PP and TP up to 8 on both sides, split anyhow; page sizes up to 128, up to 16 heads, any range of tokens; up to
    three components beside, or instead of, keys and values."""
    start, count = span
    wholes = data.draw(COMPONENTS)
    layers = data.draw(st.integers(0 if wholes else 1, 8))
    heads = data.draw(st.integers(1, 16))
    sources, destinations = (data.draw(ranks(layers, heads, size)) for size in (source_size, destination_size))
    sources = data.draw(with_components(sources, wholes))
    destinations = data.draw(with_components(destinations, wholes))
    needed = pages_for(source_size, start, count), pages_for(destination_size, start, count)
    src_pages, dst_pages = (random.sample(range(n + 2), n) for n in needed)
    sent = [random_store(rank, needed[0] + 2, seed=i) for i, rank in enumerate(sources)]
    received = [random_store(rank, needed[1] + 2, seed=100 + i) for i, rank in enumerate(destinations)]
    names = [*([KV] if layers else []), *(whole.name for whole in wholes)]
    expected = {name: assemble(received, destinations, name) for name in names}

    for name in names:
        whole = assemble(sent, sources, name)
        for position, layer, plane, head in product(range(start, start + count), *map(range, whole.shape[1:4])):
            page = dst_pages[position // destination_size - start // destination_size]
            origin = src_pages[position // source_size - start // source_size]
            slot = whole[origin, layer, plane, head, position % source_size]
            expected[name][page, layer, plane, head, position % destination_size] = slot

    moved = move(sources, sent, src_pages, destinations, received, dst_pages, start, count)
    kv_bytes = layers * 2 * heads * sources[0].head_dim * sources[0].item_bytes
    assert moved == count * (kv_bytes + sum(whole.token_bytes for whole in wholes))
    for name in names:
        assert np.array_equal(assemble(received, destinations, name), expected[name])


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


def test_a_latent_that_every_rank_has_comes_to_each_of_them_from_the_one_that_names_it() -> None:
    latent = Component("latent", "float16", layers=3, kv_heads=1, head_dim=5, planes=1)
    sources = [
        replace(GEOMETRY, kv_heads=1, head_start=0, components=(replace(latent, layers=2),)),
        replace(GEOMETRY, kv_heads=1, head_start=1, components=(replace(latent, layers=1, layer_start=2),)),
    ]
    destinations = [
        replace(GEOMETRY, page_size=3, kv_heads=1, head_start=head, components=(latent,)) for head in (0, 1)
    ]
    sent, received = (
        [random_store(rank, 4, seed=i) for i, rank in enumerate(side)] for side in (sources, destinations)
    )
    assert move(sources, sent, [3, 1], destinations, received, [2, 0], 1, 5) == 5 * sum(
        rank.token_bytes for rank in destinations
    )
    whole = gather_whole(sources, sent, [3, 1], 1, 5)
    for rank, store in zip(destinations, received, strict=True):
        assert np.array_equal(gather(store, rank, [2, 0], 1, 5, "latent"), whole)


def gather_whole(
    ranks: list[Geometry], stores: list[ArrayPageStore], pages: list[int], start: int, count: int
) -> np.ndarray:
    """Positions of the latent, [tokens, layers, 1, 1, slot bytes]."""
    whole, size = assemble(stores, ranks, "latent"), ranks[0].page_size
    return np.stack([whole[pages[p // size - start // size], :, :, :, p % size] for p in range(start, start + count)])


def test_a_full_page_is_read_without_a_copy_and_a_part_of_it_with_one() -> None:
    store = random_store(GEOMETRY, 2)
    assert np.shares_memory(store.read(1, 0, 4), store.data)
    assert np.shares_memory(store.read(1, 0, 4, box_in(GEOMETRY.tensors[0], GEOMETRY.tensors[0])), store.data)
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
