"""The page arithmetic against a twin that moves one token at a time."""

from itertools import product
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core.geometry import Geometry
from tests.transfer.harness import gather, random_store
from transfer.layout import copies, frame_bytes, frame_shape, layers_in, overlap, pages_for, segments

SIZES = st.integers(1, 9)
RANGES = st.tuples(st.integers(0, 40), st.integers(0, 40))


def geometry(page_size: int, **changes: int) -> Geometry:
    return replace(Geometry("float16", layers=2, kv_heads=2, head_dim=3, page_size=page_size), **changes)


@given(SIZES, RANGES)
def test_segments_name_every_position_once(page_size: int, span: tuple[int, int]) -> None:
    start, count = span
    named = [
        (start // page_size + cut.index) * page_size + cut.slot + i
        for cut in segments(page_size, start, count)
        for i in range(cut.count)
    ]
    assert named == list(range(start, start + count))
    assert pages_for(page_size, start, count) == len({position // page_size for position in named})


@settings(max_examples=150)
@given(SIZES, SIZES, RANGES, st.randoms(use_true_random=False))
def test_payload_lands_where_token_by_token_copying_puts_it(
    source_size: int, destination_size: int, span: tuple[int, int], random: Random
) -> None:
    start, count = span
    source, destination = geometry(source_size), geometry(destination_size)
    sent, received = random_store(source, 48, seed=1), random_store(destination, 48, seed=2)
    untouched = received.data.copy()
    src_pages = random.sample(range(48), pages_for(source_size, start, count))
    dst_pages = random.sample(range(48), pages_for(destination_size, start, count))

    cuts = segments(source_size, start, count)
    frames = [sent.read(src_pages[cut.index], cut.slot, cut.count).tobytes() for cut in cuts]
    assert [len(frame) for frame in frames] == frame_bytes(source, start, count)
    for copy in copies(source, destination, start, count):
        block = np.frombuffer(frames[copy.frame], np.uint8).reshape(frame_shape(source, cuts[copy.frame].count))
        part = block[:, :, :, copy.offset : copy.offset + copy.count]
        received.write(dst_pages[copy.index], copy.slot, copy.count, part)

    expected = untouched
    for position in range(start, start + count):
        page = dst_pages[position // destination_size - start // destination_size]
        origin = src_pages[position // source_size - start // source_size]
        expected[page, :, :, :, position % destination_size] = sent.data[origin, :, :, :, position % source_size]
    assert np.array_equal(received.data, expected)
    assert np.array_equal(
        gather(sent, source, src_pages, start, count), gather(received, destination, dst_pages, start, count)
    )


def test_a_full_page_is_read_without_a_copy_and_a_part_of_it_with_one() -> None:
    store = random_store(geometry(4), 2)
    assert np.shares_memory(store.read(1, 0, 4), store.data)
    assert np.shares_memory(store.read(1, 0, 4, slice(1, 2)), store.data)
    assert not np.shares_memory(store.read(1, 0, 3), store.data)


def test_what_two_stages_share_is_the_layers_that_both_own_and_only_with_the_same_heads() -> None:
    second = geometry(4, layers=5, layer_start=3)
    assert overlap(geometry(8, layers=4), second) == geometry(8, layers=1, layer_start=3)
    assert overlap(geometry(8, layers=9), second) == geometry(8, layers=5, layer_start=3)
    assert overlap(geometry(8, layers=2, layer_start=4), second) == geometry(8, layers=2, layer_start=4)
    assert overlap(geometry(8, layers=3), second) is None
    assert overlap(geometry(8, layers=2, layer_start=8), second) is None
    assert overlap(geometry(8, layers=9, head_start=2), second) is None


SPLITS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def stages(page_size: int, layers: list[int]) -> list[Geometry]:
    return [geometry(page_size, layers=n, layer_start=sum(layers[:i])) for i, n in enumerate(layers)]


def regroup(layers: list[int], total: int) -> list[int]:
    """A split of exactly this many layers that begins like the one given."""
    sizes: list[int] = []
    for size in [*layers, total]:
        if sum(sizes) < total:
            sizes.append(min(size, total - sum(sizes)))
    return sizes


@settings(max_examples=150)
@given(SPLITS, SPLITS, SIZES, SIZES, RANGES, st.randoms(use_true_random=False))
def test_split_and_merged_layers_land_where_copying_layer_by_layer_puts_them(
    source_split: list[int], wanted: list[int], source_size: int, destination_size: int, span: tuple[int, int],
    random: Random,
) -> None:  # fmt: skip
    start, count = span
    sources = stages(source_size, source_split)
    destinations = stages(destination_size, regroup(wanted, sum(source_split)))
    sent = [random_store(source, 48, seed=10 + i) for i, source in enumerate(sources)]
    received = [random_store(destination, 48, seed=20 + i) for i, destination in enumerate(destinations)]
    src_pages = random.sample(range(48), pages_for(source_size, start, count))
    dst_pages = random.sample(range(48), pages_for(destination_size, start, count))
    expected = np.concatenate([store.data for store in received], axis=1)
    whole = np.concatenate([store.data for store in sent], axis=1)

    moved = 0
    for (source, store), (destination, target) in product(
        zip(sources, sent, strict=True), zip(destinations, received, strict=True)
    ):
        part = overlap(source, destination)
        if part is None:
            continue
        cuts = segments(source_size, start, count)
        frames = [store.read(src_pages[c.index], c.slot, c.count, layers_in(source, part)).tobytes() for c in cuts]
        assert [len(frame) for frame in frames] == frame_bytes(part, start, count)
        moved += sum(map(len, frames))
        for copy in copies(part, destination, start, count):
            block = np.frombuffer(frames[copy.frame], np.uint8).reshape(frame_shape(part, cuts[copy.frame].count))
            tokens = block[:, :, :, copy.offset : copy.offset + copy.count]
            target.write(dst_pages[copy.index], copy.slot, copy.count, tokens, layers_in(destination, part))

    for position in range(start, start + count):
        page = dst_pages[position // destination_size - start // destination_size]
        origin = src_pages[position // source_size - start // source_size]
        expected[page, :, :, :, position % destination_size] = whole[origin, :, :, :, position % source_size]
    assert np.array_equal(np.concatenate([store.data for store in received], axis=1), expected)
    assert moved == count * sum(source.token_bytes for source in sources)
