"""Collective operations of a group of one rank: each is the identity."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Done(NamedTuple):
    """A Pending that was complete from the start."""

    result: Tensor

    def wait(self) -> Tensor:
        """See Pending."""
        return self.result


class Alone:
    """Collectives without another rank."""

    size = 1
    rank = 0

    def all_reduce(self, x: Tensor) -> Done:
        """See Collectives."""
        return Done(x)

    def all_gather(self, x: Tensor) -> Done:
        """See Collectives."""
        return Done(x)

    def reduce_scatter(self, x: Tensor) -> Done:
        """See Collectives."""
        return Done(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Done:
        """See Collectives."""
        return Done(x)

    def broadcast(self, x: Tensor, source: int) -> Done:
        """See Collectives."""
        return Done(x)

    def gather(self, x: Tensor, destination: int) -> Done:
        """See Collectives."""
        return Done(x)


ALONE = Alone()
