"""Splits a strided copy into contiguous byte runs, for hardware that moves runs. Pure arithmetic."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class ByteRuns(NamedTuple):
    """Run i: `length` bytes at offset source[i] of the source and target[i] of the target, both in bytes."""

    source: Offsets
    target: Offsets
    length: int


def runs(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> ByteRuns:
    """The longest contiguous runs of a block of bytes of this shape, whose last axis is contiguous on both sides.

    source, target: strides of all other axes, in bytes.
    """
    *counts, length = shape
    axes = list(zip(counts, source, target, strict=True))
    while axes and (axes[-1][0] == 1 or axes[-1][1:] == (length, length)):
        length *= axes.pop()[0]
    here, there = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for count, stride, target_stride in axes:
        steps = np.arange(count, dtype=np.int64)
        here = (here[:, None] + steps * stride).reshape(-1)
        there = (there[:, None] + steps * target_stride).reshape(-1)
    return ByteRuns(here, there, length)
