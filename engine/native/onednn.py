"""Weights prepacked in oneDNN's layout, so that products do not repack them: for CPUs with bfloat16 units.

Uses the operators that torch.compile uses for frozen weights (torch/_inductor/mkldnn_lowerings.py).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

ROWS = 512  # the layout is chosen for this many rows, and works with any number
PIECE = 32  # rows of a product where their number would change the order of sums: two tiles of AMX
DEPTH = 32  # of a tile


def has_bfloat16() -> bool:
    """Whether oneDNN can multiply bfloat16 on this CPU, with units for it or without: whether it should is for
    headrace.engine.device.has_matrix_units to say."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the layout for linear(), with rows of the same dtype."""
    whole = whole_depth(weight) if sums_by_rows() else weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias [out] → [rows, out]. packed: weight [out, in] from pack()."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@cache
def sums_by_rows() -> bool:
    """Whether the order in which oneDNN sums a product in 16 bits depends on the number of its rows: with the tiles of
    AMX it does (seen: 32 rows and fewer, more, and from 512 or 1,024 on again, by shape and threads)."""
    return bool(torch.cpu._is_amx_tile_supported())


def whole_depth(matrix: Tensor) -> Tensor:
    """A matrix [rows, in] with columns of zeros up to whole tiles. Of a shorter row AMX multiplies what follows it in
    memory by zeros, and the NaN of another row times zero is NaN."""
    missing = -matrix.shape[1] % DEPTH
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix


def in_pieces(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """multiply(x) [rows, out] of x [rows, in], by calls with PIECE rows each and whole tiles, so that a row's sums are
    the same in any company. What is missing is filled up with zeros; multiply()'s weight has the same depth."""
    x = whole_depth(x)
    pieces = [x[first : first + PIECE] for first in range(0, max(1, len(x)), PIECE)]
    if (missing := PIECE - len(pieces[-1])) > 0:
        pieces[-1] = torch.cat((pieces[-1], x.new_zeros(missing, x.shape[1])))
    products = [multiply(piece) for piece in pieces]
    return (torch.cat(products) if len(products) > 1 else products[0])[: len(x)]
