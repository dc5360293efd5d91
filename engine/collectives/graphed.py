"""Collective operations of layers of which CUDA graphs are captured: they stay between graphs.

So each is begun by the host in every pass, and is watched like any other: a rank that is gone is noticed as without
graphs (watch.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from headrace.engine.collectives.operations import Collectives, Done, Pending


class GraphedCollectives(Collectives):
    """Collectives of a group whose operations do not make the host wait for the device. Used by one thread."""

    def __init__(self, group: Collectives) -> None:
        """group: the same ranks."""
        self._group = group
        self._captured: Callable[[Tensor], Tensor] | None = None

    @contextmanager
    def captured(self, all_reduce: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While layers are captured: all_reduce takes what is to be summed, and gives the tensor that will have the
        sum."""
        self._captured = all_reduce
        try:
            yield
        finally:
            self._captured = None

    @property
    def size(self) -> int:
        """See Collectives."""
        return self._group.size

    @property
    def rank(self) -> int:
        """See Collectives."""
        return self._group.rank

    def all_reduce(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._group.all_reduce(x) if self._captured is None else Done(self._captured(x))

    def all_gather(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._outside().all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._outside().reduce_scatter(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """See Collectives."""
        return self._outside().all_to_all(x, sent, received)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """See Collectives."""
        return self._outside().broadcast(x, source)

    def gather(self, x: Tensor, destination: int) -> Pending:
        """See Collectives."""
        return self._outside().gather(x, destination)

    def _outside(self) -> Collectives:
        if self._captured is not None:
            raise RuntimeError("layers that are captured exchange nothing but sums")
        return self._group
