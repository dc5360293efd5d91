"""Products in 8 bits: the kernels against plain torch, rows that do not depend on others, and what is not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import EngineConfig
from headrace.engine.device import has_int8_vectors
from headrace.engine.model import int8
from headrace.engine.model.int8 import Int8Weight, quantize
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from tests.engine.kernels import normal

WITH_VNNI = [False, True] if has_int8_vectors(EngineConfig().cpuinfo) else [False]


@pytest.fixture(scope="module", params=WITH_VNNI, ids=lambda vnni: "vnni" if vnni else "256 bits")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load(vnni=request.param)


def load(*, vnni: bool) -> Kernels:
    found = load_kernels(wide=vnni, bfloat16=False, vnni=vnni)
    if found is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    return found


def in_blocks(columns: int, blocks: int, length: int, seed: int) -> Int8Weight:
    """A weight of random values, -128 too, and scales that differ."""
    values = torch.randint(
        -128, 128, (columns, blocks * length), generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )
    return Int8Weight(values, normal(columns, blocks, seed=seed).abs() / 100, blocks * length)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 30), st.integers(1, 400)), columns=st.integers(1, 150), depth=st.integers(1, 700),
    bias=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_equal_torch(
    kernels: Kernels, rows: int, columns: int, depth: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    x, weight = normal(rows, depth, seed=seed).to(dtype), quantize(normal(columns, depth, seed=seed + 1))
    added = normal(columns, seed=seed + 2).to(dtype) if bias else None
    found = kernels.linear(x, kernels.pack(weight), added)
    expected = int8.linear(x, weight, added)
    assert found.dtype == dtype
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2**-7}
    torch.testing.assert_close(found, expected, **close)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60), columns=st.integers(1, 150), blocks=st.integers(1, 20),
    length=st.sampled_from([4, 32, 128]), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_by_weights_in_blocks_equal_torch(
    kernels: Kernels, rows: int, columns: int, blocks: int, length: int, seed: int
) -> None:
    x, weight = normal(rows, blocks * length, seed=seed), in_blocks(columns, blocks, length, seed)
    torch.testing.assert_close(
        kernels.linear(x, kernels.pack(weight)), int8.linear(x, weight), atol=1e-4, rtol=1e-5
    )  # fmt: skip


def test_the_largest_sums_do_not_overflow(kernels: Kernels) -> None:
    """Every product the largest there is, in one block of a depth beyond those of the largest models."""
    depth = 32768
    for sign in (1, -1):
        x = torch.full((3, depth), 2.0 * sign)
        weight = Int8Weight(torch.full((40, depth), 127, dtype=torch.int8), torch.ones(40, 1), depth)
        torch.testing.assert_close(kernels.linear(x, kernels.pack(weight)), torch.full((3, 40), 254.0 * sign * depth))


@pytest.mark.parametrize("blocks", [9, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Kernels, dtype: torch.dtype, blocks: int) -> None:
    x = normal(400, 576).to(dtype)
    packed = kernels.pack(in_blocks(200, blocks, 576 // blocks, 1))
    whole = kernels.linear(x, packed)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 191, 192, 193, 399):
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[400 - rows :], packed), whole[400 - rows :])


@pytest.mark.skipif(len(WITH_VNNI) < 2, reason="a CPU without AVX512-VNNI")
def test_instructions_do_not_differ() -> None:
    x, weight = normal(70, 300), quantize(normal(90, 300))
    with_vnni, without = (kernels.linear(x, kernels.pack(weight)) for kernels in (load(vnni=True), load(vnni=False)))
    assert torch.equal(with_vnni, without)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(kernels: Kernels, value: float) -> None:
    """Otherwise a broken request would be answered with plausible tokens."""
    x, packed = normal(20, 50), kernels.pack(quantize(normal(40, 50)))
    expected = kernels.linear(x, packed)
    x[7, 33] = value
    found = kernels.linear(x, packed)
    assert found[7].isnan().all()
    assert int8.linear(x, quantize(normal(40, 50)))[7].isnan().all()
    assert torch.equal(found[:7], expected[:7])
    assert torch.equal(found[8:], expected[8:])


def test_rows_of_zeros_and_of_tiny_numbers(kernels: Kernels) -> None:
    packed, bias = kernels.pack(quantize(normal(40, 50))), normal(40)
    for x in (torch.zeros(3, 50), torch.full((3, 50), 1e-42), torch.full((3, 50), 1e-33)):
        torch.testing.assert_close(kernels.linear(x, packed, bias), bias.expand(3, -1))


def test_weights_of_zeros(kernels: Kernels) -> None:
    packed = kernels.pack(quantize(torch.zeros(40, 50)))
    assert torch.equal(kernels.linear(normal(3, 50), packed), torch.zeros(3, 40))


def test_a_tensor_of_another_shape_is_refused(kernels: Kernels) -> None:
    packed = kernels.pack(quantize(normal(40, 50)))
    for x in (normal(3, 49), normal(50, 3).T):
        with pytest.raises(ValueError, match="dtype, shape or stride"):
            kernels.linear(x, packed)
