"""Matrix products of the decoder, by what the hardware multiplies well."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

UPCAST_ROWS = 8  # from here on converting the weights costs less than it saves


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight [out, in] transposed + bias [out], in x's dtype."""
        ...


def native_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The library's product in the dtype of the operands."""
    return F.linear(x, weight, bias)


def upcast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """16-bit weights on a CPU without 16-bit matrix units: multiply in float32, round once at the end."""
    if x.shape[0] < UPCAST_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def choose_linear(dtype: torch.dtype, *, native_units: bool) -> Linear:
    """native_units: the device multiplies matrices of this dtype in hardware."""
    return native_linear if native_units or dtype == torch.float32 else upcast_linear
