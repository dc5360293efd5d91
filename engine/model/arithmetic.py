"""What a layer computes, apart from attention."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.model.rope import rotate


class Arithmetic(Protocol):
    def pack(self, weight: Tensor) -> Tensor:
        """A matrix [out, in] in the form in which linear() likes it best, for rows of the same dtype."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ the matrix transposed + bias [out], in x's dtype. weight: from pack()."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta, in place, unless that is None; returns its RMSNorm, times weight [width]."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place; cos and sin [rows, 1, width] of rotary_tables."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of each row [rows, 2 * width], times the second: [rows, width]."""
        ...


class TorchArithmetic:
    """On any device and in any dtype."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return add_norm(hidden, delta, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        rotate(x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        return gate(gate_up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight [out, in] transposed + bias [out], in x's dtype, which the weights may have to be given."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """hidden [rows, width] += delta, in place, unless that is None; returns its RMSNorm, times weight [width]."""
    return rms_norm(hidden if delta is None else hidden.add_(delta), weight, eps)


def gate(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row [rows, 2 * width], times the second: [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; rounded to x's dtype before the weight is applied."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
