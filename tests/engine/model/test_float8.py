"""Weights in FP8: parts of them, and joined ones, are those of the expanded weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.model.float8 import BLOCK, Float8Weight, join, stored_float8


def stored(outputs: int, blocks: int, kind: str, seed: int = 0) -> Float8Weight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, blocks * BLOCK, generator=generator).to(torch.float8_e4m3fn)
    shape = {"tensor": (), "row": (outputs, 1), "block": (-(-outputs // BLOCK), blocks)}[kind]
    found = stored_float8(values, torch.rand(shape, generator=generator) + 0.1, (BLOCK, BLOCK))
    assert found is not None
    return found


KINDS = st.sampled_from(["tensor", "row", "block"])


@given(st.integers(1, 300), st.integers(1, 3), KINDS, st.data())
def test_parts(outputs: int, blocks: int, kind: str, data: st.DataObject) -> None:
    weight = stored(outputs, blocks, kind)
    start = data.draw(st.integers(0, outputs - 1))
    stop = data.draw(st.integers(start + 1, outputs))
    first = data.draw(st.integers(0, blocks - 1))
    columns = range(first * BLOCK, data.draw(st.integers(first + 1, blocks)) * BLOCK)
    part = weight.part(range(start, stop), columns)
    assert part is not None
    assert torch.equal(part.expanded(), weight.expanded()[start:stop, columns.start : columns.stop])
    assert torch.equal(part.to("cpu").expanded(), part.expanded())


@given(st.lists(st.tuples(st.sampled_from([1, 100, 128, 256]), KINDS), min_size=1, max_size=4))
def test_joined(parts: list[tuple[int, str]]) -> None:
    weights = [stored(outputs, 2, kind, seed) for seed, (outputs, kind) in enumerate(parts)]
    assert torch.equal(join(weights).expanded(), torch.cat([weight.expanded() for weight in weights]))


@pytest.mark.parametrize(
    ("values", "scales", "block"),
    [
        (torch.zeros(4, 96), torch.ones(()), (BLOCK, BLOCK)),  # a block that is not whole
        (torch.zeros(256, 256), torch.ones(4, 2), (64, BLOCK)),
        (torch.zeros(4, 128).to(torch.float8_e5m2), torch.ones(()), (BLOCK, BLOCK)),
    ],
)
def test_what_is_expanded_instead(values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
    eight = values if values.dtype == torch.float8_e5m2 else values.to(torch.float8_e4m3fn)
    assert stored_float8(eight, scales, block) is None
    whole = stored(4, 2, "tensor")
    assert whole.part(range(4), range(64, 256)) is None
