"""Weights prepacked in oneDNN's layout, so that products do not repack them: for CPUs with bfloat16 units.

Uses the operators that torch.compile uses for frozen weights (torch/_inductor/mkldnn_lowerings.py).
"""

import torch
from torch import Tensor

ROWS = 512  # the layout is chosen for this many rows, and works with any number


def has_bfloat16() -> bool:
    """Whether oneDNN can multiply bfloat16 on this CPU, with units for it or without: whether it should is for
    headrace.engine.device.has_matrix_units to say."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the layout for linear(), with rows of the same dtype."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias [out] → [rows, out]. packed: weight [out, in] from pack()."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
