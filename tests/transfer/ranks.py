"""Sides of several ranks, and a model's KV put together from their pools."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from core.geometry import Geometry
from transfer.arrays import ArrayPageStore


def grid(page_size: int, layers: Sequence[int], heads: Sequence[int], head_dim: int = 4) -> list[Geometry]:
    """PP x TP ranks: one for each run of layers and each run of KV heads."""
    return [
        Geometry(
            "float16", layers=n, kv_heads=m, head_dim=head_dim, page_size=page_size,
            layer_start=sum(layers[:i]), head_start=sum(heads[:j]),
        )
        for i, n in enumerate(layers)
        for j, m in enumerate(heads)
    ]  # fmt: skip


def splits(total: int, most: int = 8) -> st.SearchStrategy[list[int]]:
    """The ways to cut a total into up to this many runs of one or more."""
    cuts = st.sets(st.integers(1, total - 1), max_size=most - 1) if total > 1 else st.just(set())
    return cuts.map(lambda chosen: [b - a for a, b in zip([0, *sorted(chosen)], [*sorted(chosen), total], strict=True)])


@st.composite
def sides(draw: st.DrawFn, layers: int, heads: int, page_size: int, head_dim: int = 1) -> list[Geometry]:
    """Ranks that have each head of each layer once, in any order. Stages may split their heads differently."""
    ranks: list[Geometry] = []
    start = 0
    for n in draw(splits(layers)):
        ranks += [replace(rank, layer_start=start) for rank in grid(page_size, [n], draw(splits(heads)), head_dim)]
        start += n
    return draw(st.permutations(ranks))


def assemble(stores: Sequence[ArrayPageStore], ranks: Sequence[Geometry]) -> np.ndarray:
    """One pool with all layers and heads, [pages, layers, 2, kv_heads, page_size, row bytes], out of those of ranks."""
    layers, heads = max(rank.layer_end for rank in ranks), max(rank.head_end for rank in ranks)
    pages, _, _, _, *row = stores[0].data.shape
    whole = np.zeros((pages, layers, 2, heads, *row), np.uint8)
    for store, rank in zip(stores, ranks, strict=True):
        whole[:, rank.layer_start : rank.layer_end, :, rank.head_start : rank.head_end] = store.data
    return whole
