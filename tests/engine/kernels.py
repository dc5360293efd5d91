"""Native kernels for tests of what they compute, and their operands."""

import pytest
import torch

from headrace.core.config import EngineConfig
from headrace.engine.device import has_wide_vectors
from headrace.engine.native.kernel_calls import Kernels, load_kernels

WIDTHS = [False, True] if has_wide_vectors(EngineConfig().cpuinfo) else [False]
"""Of vectors: of 256 bits, and of 512 where this CPU has them."""


def native(wide: bool) -> Kernels:
    """Those with vectors of 512 bits, or of 256; skips the test where there are none."""
    kernels = load_kernels(wide=wide, bfloat16=True)
    if kernels is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    return kernels


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same for a shape and a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """Not -0 for 0, either."""
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
