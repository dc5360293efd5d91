"""Sides of several ranks, and a model's KV put together from their pools."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.backends.strided_pool import StridedPool


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


@st.composite
def with_components(
    draw: st.DrawFn, ranks: list[Geometry], components: Sequence[Component], *, replicas: bool = False
) -> list[Geometry]:
    """The ranks, and up to two without keys and values, with each head of each layer of the components once, split
    otherwise than keys and values. replicas: a rank that would have none of a component may repeat another's part."""
    spare = replace(ranks[0], layers=0, kv_heads=0, layer_start=0, head_start=0)
    ranks = draw(st.permutations([*ranks, *[spare] * draw(st.integers(0, 2))]))
    for whole in components:
        layers = draw(splits(whole.layers, most=len(ranks)))
        heads = draw(splits(whole.kv_heads, most=len(ranks) // len(layers)))
        parts: list[Component | None] = [
            replace(
                whole, layers=n, kv_heads=m,
                layer_start=whole.layer_start + sum(layers[:i]), head_start=whole.head_start + sum(heads[:j]),
            )
            for i, n in enumerate(layers)
            for j, m in enumerate(heads)
        ]  # fmt: skip
        left = len(ranks) - len(parts)
        others = st.sampled_from([None, *parts]) if replicas else st.none()
        parts = draw(st.permutations([*parts, *draw(st.lists(others, min_size=left, max_size=left))]))
        ranks = [
            replace(rank, components=(*rank.components, part)) if part is not None else rank
            for rank, part in zip(ranks, parts, strict=True)
        ]
    return [rank for rank in ranks if rank.tensors]


def assemble(stores: Sequence[StridedPool], ranks: Sequence[Geometry], tensor: str = KV) -> np.ndarray:
    """One pool with all layers and heads of a tensor, [pages, layers, planes, kv_heads, page_size, slot bytes], out of
    those of ranks. Its layers and heads have to begin with 0."""
    parts = [
        (store.tensors[tensor], part)
        for store, rank in zip(stores, ranks, strict=True)
        for part in rank.tensors
        if part.name == tensor
    ]
    layers, heads = max(part.layer_end for _, part in parts), max(part.head_end for _, part in parts)
    pages, _, planes, _, *row = parts[0][0].shape
    whole = np.zeros((pages, layers, planes, heads, *row), np.uint8)
    for data, part in parts:
        whole[:, part.layer_start : part.layer_end, :, part.head_start : part.head_end] = data
    return whole
