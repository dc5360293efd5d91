"""Weights in 8 bits in the layout of multiply_int8.h: panels of columns, four values of depth side by side."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.model.int8 import Int8Weight

QUAD = 4  # as in multiply_int8.h, and the zero of quantised activations, which are stored without a sign
QUANTIZED_ZERO = 128
_I, _P = ctypes.c_int64, ctypes.c_void_p


class Int8Record(ctypes.Structure):
    """struct int8_matrix of multiply_int8.h. values, scales and zeros are addresses; the caller keeps their memory
    alive."""

    _fields_ = (("values", _P), ("scales", _P), ("zeros", _P), ("columns", _I), ("depth", _I), ("block", _I))


@dataclass(frozen=True)
class PackedInt8(Int8Weight):
    """An Int8Weight for the kernels; columns are filled up with zeros."""

    # values: int8 [panels, depth / QUAD, lanes, QUAD]; scales: float32 [panels, blocks, lanes]
    zeros: Tensor  # int32 [panels, blocks, lanes]: what sums begin with, for activations of QUANTIZED_ZERO
    record: Int8Record

    @property
    def columns(self) -> int:
        """Outputs."""
        columns: int = self.record.columns
        return columns


def pack_int8(weight: Int8Weight, lanes: int) -> PackedInt8:
    """Lay out a weight for kernels of so many lanes."""
    columns, depth = weight.values.shape
    blocks = weight.scales.shape[1]
    missing = -columns % lanes
    values = F.pad(weight.values, (0, 0, 0, missing)).view(-1, lanes, depth)
    sums = values.view(-1, lanes, blocks, depth // blocks).sum(dim=3, dtype=torch.int32)
    zeros = (sums * -QUANTIZED_ZERO).transpose(1, 2).contiguous()
    scales = F.pad(weight.scales, (0, 0, 0, missing)).view(-1, lanes, blocks).transpose(1, 2).contiguous()
    values = values.view(-1, lanes, depth // QUAD, QUAD).transpose(1, 2).contiguous()
    addresses = (tensor.data_ptr() for tensor in (values, scales, zeros))
    return PackedInt8(values, scales, weight.inputs, zeros, Int8Record(*addresses, columns, depth, depth // blocks))
