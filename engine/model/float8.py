"""Weights in FP8 (E4M3, arXiv 2209.05433) as they are published, with a scale for each block, row or tensor.

    weight          = values * scales               what files hold, and what memory holds
    x @ weight.T    = (x / its scales) @ values.T,  each times the scales of its blocks: in FP8, on GPUs that have it

Activations are quantised for every product, 128 elements of a row at a time, as DeepSeek-V3 does (arXiv 2412.19437,
section 3.3); scales of activations in files are not used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # inputs that share a scale, and outputs where not each has its own
LARGEST = 448.0  # of E4M3


class Float8Weight(NamedTuple):
    """A weight [out, in], or several of one shape [n, out, in]."""

    values: Tensor
    """float8_e4m3fn [..., out, in]."""
    scales: Tensor
    """float32 [..., out / rows, in / BLOCK], rounded up."""
    rows: int
    """Outputs that share a scale: 1 or BLOCK."""

    def to(self, device: str) -> "Float8Weight":
        """A copy on the device."""
        values, scales = (part.to(device, copy=True) for part in (self.values, self.scales))
        return self._replace(values=values, scales=scales.contiguous())

    def expanded(self) -> Tensor:
        """The weight: float32."""
        outputs = self.values.shape[-2]
        wide = self.scales.repeat_interleave(self.rows, -2)[..., :outputs, :].repeat_interleave(BLOCK, -1)
        return self.values.float() * wide

    def part(self, rows: range, columns: range) -> "Float8Weight | None":
        """Some rows and columns; None where columns begin or end within a block."""
        if columns.start % BLOCK or columns.stop % BLOCK:
            return None
        whole = self if rows.start % self.rows == 0 else self.by_row()
        values = whole.values[rows.start : rows.stop, columns.start : columns.stop]
        of_rows = slice(rows.start // whole.rows, -(-rows.stop // whole.rows))
        return Float8Weight(values, whole.scales[of_rows, columns.start // BLOCK : columns.stop // BLOCK], whole.rows)

    def by_row(self) -> "Float8Weight":
        """With a scale for every output."""
        return self._replace(scales=self.scales.repeat_interleave(self.rows, 0)[: len(self.values)], rows=1)


def stored_float8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Float8Weight | None:
    """A weight [out, in] of a file. scales: one, one for each row, or one for each block of so many rows and columns.
    None where these are no blocks of BLOCK, or in is no multiple of it."""
    outputs, inputs = values.shape
    if values.dtype != torch.float8_e4m3fn or inputs % BLOCK:
        return None
    wide = scales.float()
    if wide.numel() == 1:
        rows = BLOCK if outputs % BLOCK == 0 else 1
        return Float8Weight(values, wide.view(1, 1).expand(outputs // rows, inputs // BLOCK), rows)
    if wide.numel() == outputs:
        return Float8Weight(values, wide.view(outputs, 1).expand(outputs, inputs // BLOCK), 1)
    return Float8Weight(values, wide, BLOCK) if block == (BLOCK, BLOCK) else None


def join(parts: Sequence[Float8Weight]) -> Float8Weight:
    """One weight with the outputs of all parts, which have equal inputs."""
    blocks = all(part.rows == BLOCK for part in parts) and all(len(part.values) % BLOCK == 0 for part in parts[:-1])
    alike = parts if blocks else [part.by_row() for part in parts]
    # torch cannot join float8 in all versions; bytes it can.
    values = torch.cat([part.values.view(torch.uint8) for part in alike]).view(torch.float8_e4m3fn)
    return Float8Weight(values, torch.cat([part.scales for part in alike]), alike[0].rows)
