"""Digests of KV: the same however a model is divided among ranks, and another one for every bit that differs."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.kv.kv_digests import DigestPages, DigestPart, comparable, differing, joined
from headrace.core.types.packed import pack
from headrace.engine.kv.page_digest import digest_pages
from headrace.engine.kv.pool import KVPool

LAYERS, HEADS, DIM, TOKENS, LATENT = 4, 4, 8, 24, 6


def whole(seed: int) -> tuple[Tensor, Tensor]:
    """KV of a prompt [layers, 2, heads, tokens, dim], and a component beside it [layers, 1, 1, tokens, latent]."""
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(LAYERS, 2, HEADS, TOKENS, DIM, generator=random).bfloat16(),
        torch.randn(LAYERS, 1, 1, TOKENS, LATENT, generator=random),
    )


class Rank:
    """A rank with some layers and heads of the prompt, in pages that lie anywhere in its pool."""

    def __init__(self, kv: Tensor, latent: Tensor, layers: range, heads: range, page_size: int, seed: int) -> None:
        component = Component("latent", "float32", len(layers), 1, LATENT, 1, layer_start=layers.start)
        state = Component("state", "float32", len(layers), 1, 4, 1, layers.start, per_request=True)
        sizes = ("bfloat16", len(layers), len(heads), DIM, page_size, layers.start, heads.start)
        geometry = Geometry(*sizes, components=(component, state))
        count = geometry.pages_for(TOKENS)
        self.pool = KVPool(geometry, count + 3)
        self.pool.memory.random_(0, 255, generator=torch.Generator().manual_seed(seed))
        self.pages = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))[:count].tolist()
        for position in range(TOKENS):
            page, slot = self.pages[position // page_size], position % page_size
            layer, head = slice(layers.start, layers.stop), slice(heads.start, heads.stop)
            self.pool.tensors["kv"][page, :, :, :, slot] = kv[layer, :, head, position]
            self.pool.tensors["latent"][page, :, :, :, slot] = latent[layer, :, :, position]

    def digest(self, start: int, end: int) -> tuple[DigestPart, ...]:
        size = self.pool.page_size
        pages = self.pages[start // size : -(-end // size)]
        return digest_pages(self.pool, DigestPages(pack(pages), start % size, end - start))


def ranks(seed: int, cuts: list[int], tp: int, page_size: int) -> Iterator[Rank]:
    """All ranks of a server whose stages begin at these layers. More ranks than heads have some heads twice."""
    kv, latent = whole(seed)
    for first, last in pairwise([0, *cuts, LAYERS]):
        for shard in range(tp):
            heads = max(1, HEADS // tp)
            begin = shard * heads if tp <= HEADS else shard * HEADS // tp
            yield Rank(kv, latent, range(first, last), range(begin, begin + heads), page_size, shard)


def digest(server: list[Rank], start: int, end: int) -> dict[str, tuple[str, ...]]:
    return joined([part for rank in server for part in rank.digest(start, end)])


LAYOUTS = st.tuples(
    st.sets(st.integers(1, LAYERS - 1), max_size=2).map(sorted),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4, 16]),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, TOKENS - 1), st.integers(1, TOKENS))
def test_a_digest_does_not_depend_on_the_layout_and_names_the_layer_of_a_flipped_bit(
    one: tuple[list[int], int, int], other: tuple[list[int], int, int], start: int, count: int
) -> None:
    end = min(TOKENS, start + count)
    first, second = list(ranks(7, *one)), list(ranks(7, *other))
    expected = digest(first, start, end)
    assert digest(second, start, end) == expected
    assert {name: len(layers) for name, layers in expected.items()} == {"kv": LAYERS, "latent": LAYERS}
    assert differing(expected, digest(second, start, end)) == []
    rank = second[start % len(second)]
    position = start + (end - start) // 2
    page, slot = rank.pages[position // rank.pool.page_size], position % rank.pool.page_size
    layer = count % rank.pool.geometry.layers
    rank.pool.tensors["kv"].view(torch.int16)[page, layer, count % 2, 0, slot, 0] ^= 1 << count % 16
    flipped = digest(second, start, end)
    if other[1] <= HEADS:  # else another rank has the same head
        assert differing(expected, flipped) == [f"kv {rank.pool.geometry.layer_start + layer}"]
    outside = digest(second, start, position) if position > start else expected
    assert position == start or outside == digest(first, start, position), "no other position changes"


def test_what_cannot_be_compared() -> None:
    kv = {"kv": ("a", "b")}
    assert comparable(kv, {"kv": ("a", "c"), "draft": ("d",)})
    assert differing(kv, {"kv": ("a", "c"), "draft": ("d",)}) == ["kv 1"]
    assert not comparable(kv, {"latent": ("a", "b")})
    assert not comparable(kv, {"kv": ("a",)})


def test_a_page_outside_the_pool() -> None:
    with pytest.raises(IndexError):
        digest_pages(next(ranks(1, [], 1, 4)).pool, DigestPages(pack([99]), 0, 4))
