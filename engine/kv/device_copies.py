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


class DeviceCopies:
    """Copies pages to and from a GPU on a CUDA stream of their own, through pinned memory. Used by one thread.

    Neither plans nor copies wait for each other. Pages are copied to the host when the plans that write them are known
    to be done (outbox.py), and from the host into pages that no plan uses which is not done.
    """

    def __init__(self, device: torch.device) -> None:
        """device: a CUDA device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, part: Tensor) -> Tensor:
        """A contiguous copy of a tensor of any shape in pinned host memory, complete on return."""
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self.copy_to_host(part, host)
        return host

    def copy_to_host(self, part: Tensor, host: Tensor) -> None:
        """Copy a tensor (device) into host, of the same shape and contiguous; complete on return."""
        with torch.cuda.stream(self._stream):
            host.copy_(part.contiguous(), non_blocking=True)
        self._stream.synchronize()

    def to_device(self, target: Tensor, values: Tensor) -> None:
        """Copy values (host) into target (device), of the same shape; complete on return."""
        with torch.cuda.stream(self._stream):
            target.copy_(values.pin_memory().to(self._device, non_blocking=True))
        self._stream.synchronize()
