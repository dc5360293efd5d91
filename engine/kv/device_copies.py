"""Copies between a GPU's memory and the host's, while the GPU computes."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def place(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device; on the CPU they are shared. From pinned memory, so that plans are queued on a GPU without
    waiting for those before them."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DeviceCopies:
    """Of pages that come and go. On a stream of their own and through pinned memory: neither do plans wait for copies,
    nor copies for the plans queued after the one that wrote their pages. Used by one thread, apart from computed()."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def computed(self) -> None:
        """Called by the computing thread behind each plan: later copies to the host wait for what it has queued."""
        self._computed.record(torch.cuda.current_stream(self._device))

    def to_host(self, part: Tensor) -> Tensor:
        """A contiguous copy in pinned memory, complete on return."""
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            host.copy_(part.contiguous(), non_blocking=True)
        self._stream.synchronize()
        return host

    def to_device(self, target: Tensor, values: Tensor) -> None:
        """Fill target, which no queued plan may read or write; complete on return."""
        with torch.cuda.stream(self._stream):
            target.copy_(values.pin_memory().to(self._device, non_blocking=True))
        self._stream.synchronize()
