"""Interface of collective operations among the ranks of a group: tensor parallelism, exchange between experts.

All ranks of a group call the same operations in the same order, with tensors of the same dtype. An operation begins at
its call; wait() of what it returns completes it. Tensors passed in must not be used in between.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A collective operation under way."""

    def wait(self) -> Tensor:
        """The result, once it is there; call it once. Raises LinkBroken when another rank is gone."""
        ...


class Collectives(Protocol):
    """One rank's part in the collective operations of a group. Every method raises LinkBroken when a rank is gone."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        ...

    def all_reduce(self, x: Tensor) -> Pending:
        """The sum of the tensors of all ranks, of the same shape, at all of them; x may be overwritten. All ranks get
        the same bits."""
        ...

    def all_gather(self, x: Tensor) -> Pending:
        """The tensors of all ranks, of the same shape [rows, ...], in order of rank: [size * rows, ...]."""
        ...

    def reduce_scatter(self, x: Tensor) -> Pending:
        """This rank's part of the sum of all ranks' tensors [size * rows, ...]: [rows, ...]."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Rows from every rank to every rank. sent: how many consecutive rows of x go to each rank; received: how many
        come from each. Returns the received rows in order of rank."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """The tensor of rank source at all ranks; x has its shape everywhere and may be overwritten."""
        ...

    def gather(self, x: Tensor, destination: int) -> Pending:
        """The tensors of all ranks, of the same shape [rows, ...], at one of them: [size * rows, ...] in order of rank.
        At the others the result has no rows."""
        ...
