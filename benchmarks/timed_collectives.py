"""Collective operations whose time is summed, and which can be repeated without what is computed between them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.collectives.operations import Collectives, Pending


class Operation(NamedTuple):
    """One that was called."""

    begin: Callable[[Tensor], Pending]
    shape: torch.Size
    dtype: torch.dtype
    bytes: int
    """That this rank hands in or gets, whichever are more."""


class _Timed(NamedTuple):
    """A Pending whose wait is timed."""

    pending: Pending
    group: "TimedCollectives"

    def wait(self) -> Tensor:
        """See Pending."""
        started = time.perf_counter()
        result = self.pending.wait()
        self.group.seconds += time.perf_counter() - started
        return result


class TimedCollectives:
    """Collectives that note their operations, and sum the time that calls and waits take."""

    def __init__(self, group: Collectives) -> None:
        """group: does the work."""
        self.size, self.rank = group.size, group.rank
        self.seconds = 0.0
        self.operations: list[Operation] = []
        self._group = group

    def clear(self) -> None:
        """Forget operations and time."""
        self.seconds = 0.0
        self.operations.clear()

    def repeat(self) -> float:
        """Seconds of the operations so far one after the other, with nothing between them. All ranks have to call
        it."""
        sent = [torch.zeros(each.shape, dtype=each.dtype) for each in self.operations]
        self._group.all_reduce(torch.zeros(1)).wait()  # so that all begin at once
        started = time.perf_counter()
        for operation, x in zip(self.operations, sent, strict=True):
            operation.begin(x).wait()
        return time.perf_counter() - started

    def all_reduce(self, x: Tensor) -> _Timed:
        """See Collectives."""
        return self._begin(self._group.all_reduce, x)

    def all_gather(self, x: Tensor) -> _Timed:
        """See Collectives."""
        return self._begin(self._group.all_gather, x, self.size)

    def reduce_scatter(self, x: Tensor) -> _Timed:
        """See Collectives."""
        return self._begin(self._group.reduce_scatter, x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> _Timed:
        """See Collectives."""
        more = max(1.0, sum(received) / max(1, sum(sent)))
        return self._begin(lambda rows: self._group.all_to_all(rows, sent, received), x, more)

    def broadcast(self, x: Tensor, source: int) -> _Timed:
        """See Collectives."""
        return self._begin(lambda rows: self._group.broadcast(rows, source), x)

    def gather(self, x: Tensor, destination: int) -> _Timed:
        """See Collectives."""
        return self._begin(lambda rows: self._group.gather(rows, destination), x, self.size)

    def _begin(self, begin: Callable[[Tensor], Pending], x: Tensor, times: float = 1) -> _Timed:
        """times: the bytes of x that move."""
        self.operations.append(Operation(begin, x.shape, x.dtype, int(times * x.nbytes)))
        started = time.perf_counter()
        pending = begin(x)
        self.seconds += time.perf_counter() - started
        return _Timed(pending, self)
