"""Products that do what surrounds them, by Triton's interpreter, against the steps that they replace: ragged rows, odd
widths, rows of no meaning."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.model.arithmetic import HeadRules, Normed, Rows, Stream, TorchArithmetic
from headrace.engine.model.expert_choice import NO_EXPERT
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import BLOCK
from headrace.engine.triton.products import Tile
from tests.engine.triton.test_kernels import CLOSE, DTYPES, FEW, PLAIN, in_float8, kv_slots, normal, quantized

TILES = [Tile(16, 32, 16, 4, 2), Tile(32, 16, 32, 4, 2)]
SIZES = {
    "rows": st.sampled_from([0, 1, 17, 40]), "columns": st.sampled_from([1, 32, 50]),
    "inner": st.sampled_from([16, 24, 70]), "seed": st.integers(0, 99), "tile": st.sampled_from(TILES),
}  # fmt: skip


@pytest.fixture(scope="module")
def multiply(modules: dict[str, ModuleType]) -> Any:
    """products.multiply() by the interpreter."""
    return modules["products"].multiply


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Of what are sums of about one: of a sole one that is near zero the summands are rounded, not the sum."""
    scale = max(0.1, float(expected.float().abs().max())) if expected.numel() else 1.0
    close = 3 * CLOSE[dtype]  # the sums of products, and what is rounded behind them
    torch.testing.assert_close(found, expected, atol=scale * close, rtol=close)


def streamed(rows: int, inner: int, parts: int, seed: int, dtype: torch.dtype) -> Normed:
    """A residual stream with its power in parts, to be normed."""
    hidden = 3 * normal(rows, inner, seed=seed, dtype=dtype)
    powers = torch.stack([part.float().square().sum(1) for part in hidden.tensor_split(parts, 1)], 1)
    return Normed(Stream(hidden, powers), 1 + normal(inner, seed=seed + 1, dtype=dtype) / 4, 1e-5)


def given_rows(rows: int, inner: int, seed: int, dtype: torch.dtype, parts: int) -> Rows:
    """Rows that are normed, or with so many parts yet to be."""
    return streamed(rows, inner, parts, seed, dtype) if parts else normal(rows, inner, seed=seed, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(parts=st.sampled_from([0, 1, 3]), **SIZES)
@FEW
def test_gated(
    multiply: Any, dtype: torch.dtype, parts: int, rows: int, columns: int, inner: int, seed: int, tile: Tile
) -> None:
    x = given_rows(rows, inner, seed, dtype, parts)
    weight = normal(2 * columns, inner, seed=seed + 2, dtype=dtype) / inner**0.5
    out = torch.empty(rows, columns, dtype=dtype)
    multiply("gated", x, weight, out, tile)
    check(out, PLAIN.gated_linear(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(biased=st.booleans(), **SIZES)
@FEW
def test_added(
    multiply: Any, dtype: torch.dtype, biased: bool, rows: int, columns: int, inner: int, seed: int, tile: Tile
) -> None:
    x, hidden = normal(rows, inner, seed=seed, dtype=dtype), normal(rows, columns, seed=seed + 1, dtype=dtype)
    weight = normal(columns, inner, seed=seed + 2, dtype=dtype) / inner**0.5
    bias = normal(columns, seed=seed + 3, dtype=dtype) if biased else None
    expected = hidden + PLAIN.linear(x, weight, bias)
    squares = multiply("added", x, weight, hidden, tile, bias=bias)
    check(hidden, expected, dtype)
    assert squares.shape == (rows, -(-columns // tile.columns))
    torch.testing.assert_close(squares.sum(1), hidden.float().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@given(
    tokens=st.sampled_from([0, 1, 19]), query=st.integers(1, 4), kv=st.integers(1, 2), half=st.sampled_from([16, 32]),
    parts=st.sampled_from([0, 2]), inner=st.sampled_from([24, 64]), biased=st.booleans(), seed=st.integers(0, 99),
    padding=st.integers(0, 3),
)  # fmt: skip
@FEW
def test_heads(
    multiply: Any, modules: dict[str, ModuleType], dtype: torch.dtype, normed: bool,
    tokens: int, query: int, kv: int, half: int, parts: int, inner: int, biased: bool, seed: int, padding: int,
) -> None:  # fmt: skip
    width, page_size, pages = 2 * half, 4, 8
    weights = [1 + normal(width, seed=seed + each, dtype=dtype) / 4 for each in range(2)] if normed else [None, None]
    rules = HeadRules(query, kv, weights[0], weights[1], 1e-6)
    angles = normal(tokens, 1, half, seed=seed + 2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    x = given_rows(tokens, inner, seed + 3, dtype, parts)
    weight = normal(rules.heads * width, inner, seed=seed + 4, dtype=dtype) / inner**0.5
    bias = normal(rules.heads * width, seed=seed + 5, dtype=dtype) if biased else None
    pools = [torch.full((pages * 2 * kv * page_size, width), torch.nan, dtype=dtype) for _ in range(2)]
    slots = [kv_slots(pool, tokens, kv, page_size, seed, padding) for pool in pools]
    out = torch.empty(tokens, query, width, dtype=dtype)
    placing = modules["products"].Placing(rules, cos, sin, slots[0])
    multiply("heads", x, weight, out, Tile(16, half, 16, 4, 2), bias=bias, placing=placing)
    expected = PLAIN.head_linear(x, weight, bias, rules, cos, sin, slots[1])
    check(out, expected[:, :query], dtype)
    assert torch.equal(pools[0].isnan(), pools[1].isnan()), "slots of no token are left alone"
    check(pools[0].nan_to_num(), pools[1].nan_to_num(), dtype)


def sorted_rows(interpreted: TorchArithmetic, tokens: int, own: range, seed: int) -> SortedRows:
    """Of three choices each among 16 experts, some of none."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(tokens)])
    experts = experts.masked_fill_(torch.rand(experts.shape, generator=generator) < 0.3, NO_EXPERT)
    return interpreted.sort_rows(experts, own, torch.zeros(len(own), dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [pytest.param(range(16), marks=pytest.mark.full), range(4, 9)])
@given(tokens=st.sampled_from([1, 24]), inner=st.sampled_from([24, 32]), seed=st.integers(0, 99))
@FEW
def test_gated_experts(
    multiply: Any, modules: dict[str, ModuleType], interpreted: TorchArithmetic,
    own: range, dtype: torch.dtype, tokens: int, inner: int, seed: int,
) -> None:  # fmt: skip
    rows, columns = sorted_rows(interpreted, tokens, own, seed), 50
    x = normal(tokens, inner, seed=seed, dtype=dtype)
    total = int(rows.total)
    taken = (rows.sources[:total] // 3).long()
    unused = torch.ones(tokens, dtype=torch.bool)
    unused[taken] = False
    x[unused] = torch.nan
    weight = normal(len(own), 2 * columns, inner, seed=seed + 1, dtype=dtype) / inner**0.5
    out = torch.full((3 * tokens, columns), 7.0, dtype=dtype)
    multiply("gated", x, weight, out, TILES[0], grouped=modules["products"].Grouped(rows, 3))
    for number, (start, stop) in enumerate(pairwise([0, *rows.ends.tolist()])):
        check(out[start:stop], PLAIN.gated_linear(x[taken[start:stop]], weight[number]), dtype)
    assert (out[total:] == 7).all(), "rows of no meaning are not computed"


@pytest.mark.parametrize("experts", [False, True])
@given(tokens=st.sampled_from([1, 24]), seed=st.integers(0, 99))
@FEW
def test_gated_in_float8(
    multiply: Any, modules: dict[str, ModuleType], interpreted: TorchArithmetic, experts: bool, tokens: int, seed: int
) -> None:
    own, columns, inner = range(4, 9), 2 * BLOCK, 2 * BLOCK
    rows = sorted_rows(interpreted, tokens, own, seed)
    shape = (len(own), columns, inner) if experts else (columns, inner)
    weight = in_float8(*shape, rows=BLOCK, seed=seed + 1)
    weight = weight._replace(scales=weight.scales / 40)
    x = normal(tokens, inner, seed=seed, dtype=torch.float16)
    made: Any = interpreted
    out = torch.empty(3 * tokens if experts else tokens, columns // 2, dtype=torch.float16)
    grouped = modules["products"].Grouped(rows, 3) if experts else None
    multiply("gated", made.quantize_rows(x), weight, out, Tile(64, 64, BLOCK, 4, 2), grouped=grouped)
    wide, expanded = quantized(interpreted, x), weight.expanded().view(-1, columns, inner)
    taken = (rows.sources[: int(rows.total)] // 3).long() if experts else torch.arange(tokens)
    for number, (start, stop) in enumerate(pairwise([0, *rows.ends.tolist()] if experts else [0, tokens])):
        expected = PLAIN.gated_linear(wide[taken[start:stop]], expanded[number])
        check(out[start:stop].float(), expected, torch.float16)


def test_a_row_has_the_same_bits_whatever_is_computed_with_it(multiply: Any) -> None:
    """By one tile for any number of rows."""
    x = normal(70, 70, seed=1, dtype=torch.bfloat16)
    weight = normal(2 * 50, 70, seed=2, dtype=torch.bfloat16)
    whole, part = torch.empty(70, 50, dtype=torch.bfloat16), torch.empty(3, 50, dtype=torch.bfloat16)
    multiply("gated", x, weight, whole, TILES[0])
    for first in (0, 30, 67):
        multiply("gated", x[first : first + 3].contiguous(), weight, part, TILES[0])
        assert torch.equal(part, whole[first : first + 3])
