"""Layer arithmetic apart from attention: linear layers, RMSNorm with residual, rotary embedding, SwiGLU gate."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.model import int8
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.model.rope import rotate

Weight = Tensor | Int8Weight
"""A matrix [out, in] of a linear layer."""


class Arithmetic(Protocol):
    """The operations of a layer; implemented in torch, in compiled kernels (compiled.py) and in C (engine/native)."""

    def pack(self, weight: Weight) -> Weight:
        """A weight [out, in] in the layout that linear() multiplies fastest, for rows of the same dtype if it is not in
        8 bits."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight.T + bias [out] → [rows, out], in x's dtype. weight: from pack()."""
        ...

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """x [rows, in] @ head.T → float32 [rows, out]: the output head [out, in], as an embedding is held."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [rows, heads, width] in place. cos, sin: float32 [rows, 1, width] of rotary_tables."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU gate (arXiv 2002.05202): gate_up [rows, 2 * width] → silu(first half) * second half [rows, width]."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Weight) -> Tensor:
        """gate() of a product: x [rows, in] @ gate_up.T [in, 2 * width] → silu(first half) *
        second half [rows, width], with the bits of gate(linear()). gate_up: from pack()."""
        ...


class TorchArithmetic:
    """Arithmetic in plain torch, on any device and in any dtype."""

    def pack(self, weight: Weight) -> Weight:
        """The weight itself."""
        return weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Arithmetic."""
        return linear(x, weight, bias)

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """See Arithmetic."""
        return linear(x, head).float()

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See Arithmetic."""
        return add_norm(hidden, delta, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Arithmetic."""
        rotate(x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        """See Arithmetic."""
        return gate(gate_up)

    def gated_linear(self, x: Tensor, gate_up: Weight) -> Tensor:
        """See Arithmetic."""
        return self.gate(self.linear(x, gate_up))


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight [out, in].T + bias [out] → [rows, out]; weight and bias are converted to x's dtype."""
    if isinstance(weight, Int8Weight):
        return int8.linear(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """hidden [rows, width] += delta in place, unless delta is None; returns RMSNorm(hidden) * weight [width]."""
    return rms_norm(hidden if delta is None else hidden.add_(delta), weight, eps)


def gate(gate_up: Tensor) -> Tensor:
    """SwiGLU gate (arXiv 2002.05202): gate_up [rows, 2 * width] → silu(first half) * second half [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) over the last axis of x [rows, width], times weight [width].

    Computed in float32 and rounded to x's dtype before the weight is applied, as transformers does.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
