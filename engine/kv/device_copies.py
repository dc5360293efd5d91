"""Copies between GPU and host memory that overlap with computation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def place(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array of any shape as a tensor on the device; on the CPU the memory is shared.

    Copies to a GPU go through pinned memory, so that queueing a plan does not wait for the plans before it.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def begin_copy(values: Tensor) -> Tensor:
    """A tensor in host memory: on the CPU itself, from a GPU a copy that is complete when the current stream is."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def select_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of a tensor [n, ...]. An index in a list would make the host wait for the device."""
    return x.index_select(0, place(np.array(rows, np.int64), x.device))
