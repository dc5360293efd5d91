"""Matrices in a layout of oneDNN's own, which every product would else make of them: for CPUs with units for bfloat16.

By the operators to which torch.compile takes frozen weights (torch/_inductor/mkldnn_lowerings.py).
"""

import torch
from torch import Tensor

ROWS = 512  # the layout is the best one for so many, and good for any number


def has_bfloat16() -> bool:
    """Whether oneDNN can multiply bfloat16 on this CPU, with units for it or without: whether it should is for
    headrace.engine.device.has_matrix_units to say."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """[out, in] for linear() with rows of the same dtype."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ the matrix transposed + bias [out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
