"""Weights in 8 bits in the layout of int8.h: panels of columns, four values of depth side by side."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.model.int8 import Int8Weight

QUAD = 4  # as in int8.h, and the zero of quantised activations, which are stored without a sign
QUANTIZED_ZERO = 128
_I, _P = ctypes.c_int64, ctypes.c_void_p


class Int8Record(ctypes.Structure):
    """struct int8_matrix of int8.h. values, scales and offsets are addresses; the caller keeps their memory alive."""

    _fields_ = (("values", _P), ("scales", _P), ("offsets", _P), ("columns", _I), ("depth", _I), ("block", _I))


@dataclass(frozen=True)
class PackedInt8(Int8Weight):
    """An Int8Weight for the kernels; columns and depth are filled up with zeros."""

    # values: int8 [panels, depth / QUAD, lanes, QUAD]; scales: float32 [panels, blocks, lanes]
    offsets: Tensor  # int32 [panels, blocks, lanes]: what QUANTIZED_ZERO adds to the sums
    width: int  # inputs
    record: Int8Record

    @property
    def columns(self) -> int:
        """Outputs."""
        columns: int = self.record.columns
        return columns


def pack_int8(weight: Int8Weight, lanes: int) -> PackedInt8:
    """Lay out a weight for kernels of so many lanes."""
    columns, width = weight.values.shape
    blocks = weight.scales.shape[1]
    panels, depth = -(-columns // lanes), -(-width // QUAD) * QUAD
    filled = torch.zeros(panels * lanes, depth, dtype=torch.int8)
    filled[:columns, :width] = weight.values
    values = filled.view(panels, lanes, depth // QUAD, QUAD).transpose(1, 2).contiguous()
    sums = filled.view(panels, lanes, blocks, depth // blocks).sum(dim=3, dtype=torch.int32)
    offsets = (sums * QUANTIZED_ZERO).transpose(1, 2).contiguous()
    scales = torch.zeros(panels * lanes, blocks)
    scales[:columns] = weight.scales
    scales = scales.view(panels, lanes, blocks).transpose(1, 2).contiguous()
    record = Int8Record(
        values.data_ptr(), scales.data_ptr(), offsets.data_ptr(), columns, depth, depth // blocks
    )  # fmt: skip
    return PackedInt8(values, scales, offsets, width, record)
