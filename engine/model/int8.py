"""Weights in 8 bits, in blocks along the depth of a product, and their product in plain torch.

Weights are quantised when they are loaded, or taken from GGUF's Q8_0 as they are; activations for every product
("dynamic quantization", W8A8). Both symmetrically, a block of one row at a time: x becomes round(x * 127 / max|x|).
With one scale for a whole token, its few large activations leave little of the others: predictions of SmolLM2 then
diverge six times as far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # inputs that share a scale, where a file does not say otherwise
LARGEST = 127  # of a quantised value
SMALLEST = 1e-30  # of a block's largest elements; below it a block is zero


@dataclass(frozen=True)
class Int8Weight:
    """A weight [out, in] in 8 bits. An output has a scale for every block of inputs."""

    values: Tensor  # int8 [out, in], filled up with zeros to whole blocks
    scales: Tensor  # float32 [out, blocks]
    inputs: int


def quantize(weight: Tensor, block: int = BLOCK) -> Int8Weight:
    """Quantise a weight [out, in] in blocks of so many inputs."""
    values, scales = _blocks(weight, block)
    return Int8Weight(values.flatten(1).to(torch.int8), scales, weight.shape[1])


def join(parts: Sequence[Int8Weight]) -> Int8Weight:
    """One weight with the outputs of all parts, which have equal inputs and blocks."""
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return Int8Weight(values, scales, parts[0].inputs)


def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], quantised, @ weight.T + bias [out] → [rows, out], in x's dtype."""
    outputs, blocks = weight.scales.shape
    values, scales = _blocks(x, weight.values.shape[1] // blocks)
    sums = torch.einsum("rbi,obi->bro", values, weight.values.view(outputs, blocks, -1).float())  # exact in float32
    product = torch.einsum("bro,rb,ob->ro", sums, scales, weight.scales)
    return (product if bias is None else product.add_(bias)).to(x.dtype)


def _blocks(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantise rows [rows, width] → whole numbers, float32 [rows, blocks, block], and scales [rows, blocks]."""
    wide = F.pad(rows.float(), (0, -rows.shape[1] % block)).view(len(rows), -1, block)
    top = wide.abs().amax(dim=2, keepdim=True)
    factor = torch.where(top > SMALLEST, torch.full_like(top, LARGEST).div_(top), 0)
    values = (wide.double() * factor).round_().float()  # rounded once, as by the kernels' fused multiply-add
    return values, torch.where(factor > 0, top / LARGEST, top * 0)[:, :, 0]
