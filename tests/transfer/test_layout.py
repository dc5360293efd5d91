"""The page arithmetic against a twin that moves one token at a time."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core.geometry import Geometry
from tests.transfer.harness import gather, random_store
from transfer.layout import copies, counterpart, frame_bytes, frame_shape, pages_for, segments

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
    assert not np.shares_memory(store.read(1, 0, 3), store.data)


def test_a_stage_takes_only_its_own_layers_and_heads() -> None:
    halves = (geometry(4), geometry(4, layer_start=2))
    assert counterpart(geometry(8, layer_start=2), halves) == 1
    assert counterpart(geometry(8), halves) == 0
    assert counterpart(geometry(8, layers=4), halves) is None
    assert counterpart(geometry(8, head_start=2), halves) is None
