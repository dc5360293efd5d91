"""What a layer does between its matrix products, apart from attention."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.rope import rotate


class Elementwise(Protocol):
    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta, in place, unless that is None; returns its RMSNorm, times weight [width]."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place; cos and sin [rows, 1, width] of rotary_tables."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of each row [rows, 2 * width], times the second: [rows, width]."""
        ...


class TorchElementwise:
    """On any device and in any dtype."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(hidden if delta is None else hidden.add_(delta), weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        rotate(x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; rounded to x's dtype before the weight is applied."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
