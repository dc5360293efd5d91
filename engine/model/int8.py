"""Weights in 8 bits: quantisation per output channel, or GGUF's blocks as they are, and their product in plain torch.

Activations are quantised for every product, symmetrically and per token ("dynamic quantization", W8A8): a row x becomes
round(x * 127 / max|x|). Sums of such products are exact in integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127  # of a quantised value; -128 is not used
SMALLEST = 1e-30  # of a row's largest elements; below it a row is zero
EXACT = 1024  # products of two quantised values that float32 adds up without rounding


@dataclass(frozen=True)
class Int8Weight:
    """A weight [out, in] in 8 bits. An output channel has a scale for every block of in / blocks inputs."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out, blocks]


def quantize(weight: Tensor) -> Int8Weight:
    """Quantise a weight [out, in], one scale per output channel."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    values = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
    return Int8Weight(values.to(torch.int8), scales)


def join(parts: Sequence[Int8Weight]) -> Int8Weight:
    """One weight with the outputs of all parts, which have equally many blocks."""
    return Int8Weight(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], quantised row by row, @ weight.T + bias [out] → [rows, out], in x's dtype."""
    wide = x.float()
    top = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(top > SMALLEST, torch.full_like(top, LARGEST).div_(top), 0)
    quantized = (wide.double() * factor).round_().float()  # rounded once, as by the kernels' fused multiply-add
    blocks = weight.scales.shape[1]
    length = x.shape[1] // blocks
    product = torch.zeros(len(x), len(weight.values))
    for block in range(blocks):
        first, last = block * length, (block + 1) * length
        sums = torch.zeros(len(x), len(weight.values), dtype=torch.float64)
        for start in range(first, last, EXACT):
            columns = slice(start, min(start + EXACT, last))
            sums += quantized[:, columns] @ weight.values[:, columns].T.float()
        product += sums.float() * weight.scales[:, block]
    product *= top / LARGEST
    return (product if bias is None else product.add_(bias)).to(x.dtype)
