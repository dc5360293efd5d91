"""Pools that are laid out in any way, against a twin that computes the address of every slot."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.kv.backends import Placement, PoolLayout
from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.backends.strided_pool import ArrayPageStore, StridedPool, c_order, placed
from headrace.transfer.protocol.layout import Box
from tests.transfer.harness import random_store
from tests.transfer.layouts import random_layout

PAGES = 4
FILL = 0xEE
LATENT = Component("latent", "float16", layers=3, kv_heads=1, head_dim=5, planes=1)
GEOMETRY = Geometry("float16", layers=2, kv_heads=3, head_dim=2, page_size=4, components=(LATENT,))
SIZE = st.integers(1, 4)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    draft = st.builds(Component, st.just("draft"), st.sampled_from(["uint8", "float32"]), SIZE, SIZE, SIZE)
    components = draw(st.sampled_from([(), (LATENT,), (draw(draft), LATENT)]))
    layers = draw(st.integers(0 if components else 1, 4))
    return Geometry("float16", layers, draw(SIZE), draw(SIZE), draw(st.integers(1, 6)), components=components)


def place_of(layout: PoolLayout, name: str) -> Placement:
    kv = Placement(name=KV, offset=layout.offset, strides=layout.strides)
    return next(place for place in (kv, *layout.components) if place.name == name)


@settings(deadline=None, max_examples=60)
@given(geometries(), st.randoms(use_true_random=False), st.data())
def test_slots_are_written_and_read_where_the_strides_say_and_nowhere_else(
    geometry: Geometry, random: Random, data: st.DataObject
) -> None:
    layout = random_layout(geometry, PAGES, random)
    memory = np.full(layout.bytes, FILL, np.uint8)
    pool, source = StridedPool(geometry, layout, memory), random_store(geometry, PAGES)
    expected = memory.copy()
    for tensor in geometry.tensors:
        page, slot = random.randrange(PAGES), random.randrange(geometry.page_size)
        count = random.randint(1, geometry.page_size - slot)
        layers, heads = (slice(n := random.randrange(size), random.randint(n + 1, size))
                         for size in (tensor.layers, tensor.kv_heads))  # fmt: skip
        box = Box(layers, heads, tensor.name)
        piece = source.view(page, slot, count, box)
        place = place_of(layout, tensor.name)
        for layer, plane, head, at in product(*map(range, piece.shape[:4])):
            index = (page, layers.start + layer, plane, heads.start + head, slot + at)
            address = place.offset + sum(n * stride for n, stride in zip(index, place.strides, strict=True))
            expected[address : address + tensor.slot_bytes] = piece[layer, plane, head, at]
        pool.write(page, slot, count, piece, box)
        assert np.array_equal(pool.read(page, slot, count, box), piece)
    assert np.array_equal(memory, expected)


@given(geometries(), st.randoms(use_true_random=False), st.data())
def test_a_layout_that_leaves_its_memory_is_refused_before_use(
    geometry: Geometry, random: Random, data: st.DataObject
) -> None:
    """random_layout() needs its last byte, so one less, or one more anywhere before it, is too much."""
    layout = random_layout(geometry, PAGES, random)
    assert [tensor for tensor, _ in placed(geometry, layout)] == list(geometry.tensors)
    with pytest.raises(ValueError, match="do not lie within"):
        list(placed(geometry, replace(layout, bytes=layout.bytes - 1)))
    tensor = data.draw(st.sampled_from(geometry.tensors))
    place = place_of(layout, tensor.name)
    lengths = (PAGES, tensor.layers, tensor.planes, tensor.kv_heads, geometry.page_size)
    axis = data.draw(st.integers(0, 4))
    assume(lengths[axis] > 1)
    strides = list(place.strides)
    strides[axis] += data.draw(st.sampled_from([layout.bytes, 1 << 62]))
    moved = Placement(name=tensor.name, offset=place.offset, strides=tuple(strides))  # type: ignore[arg-type]
    further = replace(place, offset=place.offset + layout.bytes)
    for spoilt in (moved, further):
        if tensor.name == KV:
            changed = replace(layout, strides=spoilt.strides, offset=spoilt.offset)
        else:
            others = tuple(each for each in layout.components if each.name != tensor.name)
            changed = replace(layout, components=(spoilt, *others))
        with pytest.raises(ValueError, match=f"its pages of {tensor.name} do not lie within"):
            StridedPool(geometry, changed, np.zeros(layout.bytes, np.uint8))


def test_a_layout_without_a_component_of_the_pool_is_refused() -> None:
    layout = replace(c_order(GEOMETRY, PAGES), components=())
    with pytest.raises(ValueError, match="its layout has no component latent"):
        StridedPool(GEOMETRY, layout, np.zeros(layout.bytes, np.uint8))


def test_memory_that_is_smaller_than_its_description_is_refused() -> None:
    layout = c_order(GEOMETRY, PAGES)
    with pytest.raises(ValueError, match="buffer"):
        StridedPool(GEOMETRY, layout, np.zeros(layout.bytes - 1, np.uint8))


@pytest.mark.parametrize(("page", "slot", "count"), [(-1, 0, 1), (PAGES, 0, 1), (0, -1, 1), (0, 4, 1), (0, 3, 2)])
@pytest.mark.parametrize("tensor", [KV, "latent"])
def test_pages_and_slots_beside_the_pool_are_refused(page: int, slot: int, count: int, tensor: str) -> None:
    with pytest.raises(IndexError):
        ArrayPageStore(GEOMETRY, PAGES).view(page, slot, count, Box(slice(None), slice(None), tensor))


def test_a_pool_in_c_order_is_as_large_as_its_pages() -> None:
    layout = c_order(GEOMETRY, PAGES)
    assert layout.bytes == PAGES * GEOMETRY.page_bytes
    assert [place.name for place in layout.components] == ["latent"]
    plain = c_order(replace(GEOMETRY, components=()), PAGES)
    assert (plain.strides, plain.offset) == (layout.strides, layout.offset)
