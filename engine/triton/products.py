"""Products of our own: which of a model's are, by which tiles, and the calls of their kernel (product_kernels.py).

Imported where Triton is installed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.arithmetic import HeadRules, KvSlots, Normed, Rows, Weight, unnormed
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import BLOCK, Float8Weight
from headrace.engine.triton import kernels
from headrace.engine.triton.launch import launch, power_of_2
from headrace.engine.triton.product_kernels import product

LEAST_ROWS = 512  # fewer have not been measured
ALIGNMENT = 8  # elements: rows of 16 bytes are read at once
GROUP = 8  # tiles of rows that go through the columns together
HALVES = (16, 32, 64, 128)  # of heads, in elements
WIDE_HALF = 64  # of wider ones a tile has fewer rows, whose sums stay in registers


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    columns: int
    """Of outputs; with a gate as many of either half."""
    inner: int
    """Elements of rows and weights in one step."""
    warps: int
    stages: int


TILES = {
    8: {
        "gated": Tile(128, 64, 64, 8, 3),
        "added": Tile(128, 128, 64, 8, 3),
        "heads": Tile(128, 0, 32, 8, 4),
    },
    9: {
        "gated": Tile(128, 128, 64, 8, 3),
        "added": Tile(128, 256, 64, 8, 3),
        "heads": Tile(128, 0, 64, 8, 4),
    },
}
"""In 16 bits, by compute capability. Columns of heads are a half of each."""
FLOAT8_TILES = {
    "plain": Tile(128, 128, BLOCK, 8, 3),
    "gated": Tile(128, 64, BLOCK, 8, 3),
    "added": Tile(128, 128, BLOCK, 8, 3),
    "heads": Tile(128, 0, BLOCK, 8, 3),
}
FEW_ROWS = Tile(64, 128, BLOCK, 4, 3)
"""In FP8, where there are no more, on the average of experts."""


class Placing(NamedTuple):
    """How heads are placed, see Arithmetic.place_heads()."""

    rules: HeadRules
    cos: Tensor
    sin: Tensor
    slots: KvSlots


class Grouped(NamedTuple):
    """Rows of experts, which are taken from those of tokens."""

    rows: SortedRows
    k: int
    """Choices of a token; 0: the rows are those of the experts already."""


class Float8Rows(NamedTuple):
    """Rows in FP8, of Arithmetic.quantize_rows()."""

    values: Tensor
    scales: Tensor


class OwnProducts:
    """Which products of a model are our own: those of experts with their gate, on request those of one weight, too.

    That is a rule, and nothing is timed: ranks and servers with the same settings and GPUs round alike. A product has
    one tile for any number of rows, so that a row has the same bits whatever others are computed with it; of torch's,
    which passes of fewer rows take, that cannot be said.
    """

    def __init__(self, *, dense: bool = False, least_rows: int = LEAST_ROWS) -> None:
        """dense: those of one weight, and those in FP8, are our own, too. least_rows: of fewer they are torch's."""
        self._dense, self._least_rows = dense, least_rows

    def tile(self, form: str, x: Rows, weight: Weight, half: int = 0) -> Tile | None:
        """By which rows are multiplied with a weight [out, in] or [experts, out, in]; None: torch's product is taken.
        form: see the kernel. half: of a head."""
        rows, in_float8, values = unnormed(x), isinstance(weight, Float8Weight), values_of(weight)
        if values is None or rows.dtype not in (torch.bfloat16, torch.float16):
            return None
        alike = in_float8 or (values.dtype == rows.dtype and values.is_contiguous())
        if not alike or values.shape[-1] % ALIGNMENT or not rows.is_contiguous():
            return None
        if len(rows) < self._least_rows or not (self._dense or (values.dim() == 3 and not in_float8)):
            return None
        return tile_of(form, rows.device, half, in_float8=in_float8)


def values_of(weight: Weight) -> Tensor | None:
    """Elements of a weight, [out, in] or [experts, out, in], without the scales that they may have; None of a weight
    that these products do not multiply."""
    values = weight.values if isinstance(weight, Float8Weight) else weight
    return values if isinstance(values, Tensor) else None


def tile_of(form: str, device: torch.device, half: int = 0, *, in_float8: bool = False) -> Tile:
    """By which a product is computed on such a device. half: of a head."""
    tiles = FLOAT8_TILES if in_float8 else TILES[9 if torch.cuda.get_device_properties(device).major in (9, 10) else 8]
    tile = tiles[form]
    return tile if half <= WIDE_HALF else tile._replace(rows=tile.rows // 2)


def multiply(
    form: str,
    x: Rows | Float8Rows,
    weight: Weight,
    out: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    grouped: Grouped | None = None,
    placing: Placing | None = None,
) -> Tensor:
    """Compute out, see the kernel. grouped: rows of experts. Returns squares [rows, parts], which mean
    something for "added"."""
    values = values_of(weight)
    assert values is not None
    nothing, scales, normed = out, out, None
    across, tile_columns = (len(values), out.shape[-1] // 2) if placing else (values.shape[-2], tile.columns)
    if isinstance(x, Normed):
        normed, factors = x, x.stream.hidden
    elif isinstance(x, Float8Rows):
        factors, scales = x
    else:
        factors = x
    rows, inner = len(out), factors.shape[1]
    columns = across // 2 if form in ("gated", "heads") else across
    apart = {"gated": columns, "heads": tile_columns}.get(form, 0)
    tiles = ceil_div(columns, tile_columns)
    squares = torch.empty(rows, tiles, dtype=torch.float32, device=out.device) if form == "added" else nothing
    if not rows:
        return squares
    experts = len(values) if grouped else 0
    parts = normed.stream.powers.shape[1] if normed else 0
    shared = weight.rows if isinstance(weight, Float8Weight) else 1
    of_experts = (grouped.rows.ends, grouped.rows.sources) if grouped else (nothing, nothing)
    launch(
        product, ((ceil_div(rows, tile.rows) + experts) * tiles,),
        factors, scales, values, weight.scales if isinstance(weight, Float8Weight) else nothing,
        nothing if bias is None else bias, out, *of_experts,
        normed.weight if normed else nothing, normed.stream.powers if normed else nothing, squares,
        *_placing(placing, nothing), rows, columns, inner, apart, parts, normed.eps if normed else 0.0,
        placing.rules.eps if placing else 0.0, placing.slots.step if placing else 0,
        FORM=form, EXPERTS=experts, K=grouped.k if grouped else 0, SHARED=shared,
        SCALED=isinstance(x, Float8Rows), BIASED=bias is not None, NORMED=normed is not None,
        QUERY=placing.rules.query_heads if placing else 0, KV=placing.rules.kv_heads if placing else 0,
        HEADS_NORMED=placing is not None and placing.rules.q_norm is not None, WIDE=kernels.INTERPRETED,
        EVEN=inner % tile.inner == 0, TILE_M=tile.rows, TILE_N=tile_columns, BLOCK=tile.inner, GROUP=GROUP,
        EXPERT_BLOCK=power_of_2(max(1, experts)), PART_BLOCK=power_of_2(max(1, parts)),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return squares


def _placing(placing: Placing | None, nothing: Tensor) -> tuple[Tensor, ...]:
    """cos, sin, weights of norms, slots and each token's first."""
    if placing is None:
        return (nothing,) * 6
    (rules, cos, sin, slots) = placing
    norms = nothing if rules.q_norm is None else rules.q_norm, nothing if rules.k_norm is None else rules.k_norm
    return (cos, sin, *norms, slots.slots, slots.first)
