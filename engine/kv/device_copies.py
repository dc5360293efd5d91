"""Copies between GPU and host memory that overlap with computation."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def place(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array of any shape as a tensor on the device; on the CPU the memory is shared.

    Copies to a GPU go through pinned memory, so that queueing a plan does not wait for the plans before it.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DeviceCopies:
    """Copies pages to and from a GPU on a CUDA stream of their own, through pinned memory.

    Plans do not wait for copies, and a copy waits for the plans queued before it only. Used by one thread, except
    mark_computed().
    """

    def __init__(self, device: torch.device) -> None:
        """device: a CUDA device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark_computed(self) -> None:
        """Called by the compute thread after queueing a plan: later copies to the host wait for the plan."""
        self._computed.record(torch.cuda.current_stream(self._device))

    def to_host(self, part: Tensor) -> Tensor:
        """A contiguous copy of a tensor of any shape in pinned host memory, complete on return."""
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self.copy_to_host(part, host)
        return host

    def copy_to_host(self, part: Tensor, host: Tensor) -> None:
        """Copy a tensor (device) into host, of the same shape and contiguous; complete on return."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            host.copy_(part.contiguous(), non_blocking=True)
        self._stream.synchronize()

    def to_device(self, target: Tensor, values: Tensor) -> None:
        """Copy values (host) into target (device), of the same shape; complete on return. Plans that were queued before
        and use target are waited for; none queued later may use it meanwhile."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            target.copy_(values.pin_memory().to(self._device, non_blocking=True))
        self._stream.synchronize()
