"""Collectives of ranks on GPUs through host memory: where two ranks share a GPU, which NCCL refuses, or by choice.

device ──copy──► pinned memory ──operation──► host memory ──copy──► device
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.collectives.operations import Collectives, Pending


class _Staged(NamedTuple):
    """An operation on the host under way."""

    pending: Pending
    device: torch.device

    def wait(self) -> Tensor:
        """See Pending."""
        return to_device(self.pending.wait(), self.device)


class HostStaged:
    """Collectives on copies in host memory. Used by one thread.

    An operation waits for the device to come to it, and the device for its result: the host queues nothing beyond.
    What is exchanged travels while the device computes what was queued before the wait, as with any other group.
    """

    def __init__(self, hosts: Collectives) -> None:
        """hosts: the same ranks, for tensors in host memory."""
        self._hosts = hosts
        self.size = hosts.size
        self.rank = hosts.rank

    def all_reduce(self, x: Tensor) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.all_reduce(on_host(x)), x.device)

    def all_gather(self, x: Tensor) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.all_gather(on_host(x)), x.device)

    def reduce_scatter(self, x: Tensor) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.reduce_scatter(on_host(x)), x.device)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.all_to_all(on_host(x), sent, received), x.device)

    def broadcast(self, x: Tensor, source: int) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.broadcast(on_host(x), source), x.device)

    def gather(self, x: Tensor, destination: int) -> _Staged:
        """See Collectives."""
        return _Staged(self._hosts.gather(on_host(x), destination), x.device)


def on_host(x: Tensor) -> Tensor:
    """A copy of a tensor in host memory, complete on return: what was queued on the current stream is waited for."""
    host, copied = begin_host_copy(x)
    if copied is not None:
        copied.synchronize()
    return host


def begin_host_copy(x: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    """A copy of a tensor in pinned memory, with the event behind it; of one on the CPU a copy, which is complete."""
    if x.device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format), None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(x.device))
    return host, copied


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor in host memory, complete before what is queued on the current stream from now on. The host
    waits for nothing."""
    if device.type == "cpu":
        return host.clone()
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)
