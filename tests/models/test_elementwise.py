"""Functions of single elements in transformers' modules: the same bits wherever one is, and beside how many."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from headrace.engine.library.modules import EXPONENTIAL, Products
from headrace.engine.model.arithmetic import TorchArithmetic

MOST = 3 * 32768


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", sorted(EXPONENTIAL, key=lambda each: (each.__name__, str(each))))
@settings(max_examples=25, deadline=None)
@given(begin=st.integers(0, 200), count=st.integers(1, 400) | st.integers(1, MOST), threads=st.integers(1, 5))
def test_an_element_has_the_same_bits_in_every_place(
    function: Callable[..., Tensor], dtype: torch.dtype, begin: int, count: int, threads: int
) -> None:
    torch.set_num_threads(1)
    values = (torch.rand(200 + MOST, generator=torch.Generator().manual_seed(0)) * 8 + 0.01).to(dtype)
    with Products(TorchArithmetic()):
        every = function(values)
        torch.set_num_threads(threads)
        assert torch.equal(function(values[begin : begin + count]), every[begin : begin + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", [F.silu, lambda x: F.gelu(x, approximate="tanh"), lambda x: x.sigmoid()])
def test_parts_of_rows_are_as_whole_ones(call: Callable[[Any], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = torch.randn(37, 2 * 24).to(dtype)
    with Products(TorchArithmetic()):
        found = call(both.chunk(2, -1)[1])
        alone = torch.cat([call(row[None, 24:].contiguous()) for row in both])
    assert found.shape == (37, 24)
    assert torch.equal(found, alone)
