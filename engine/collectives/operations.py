"""Collective operations among the ranks of a group (tensor parallelism, exchange between experts): their interface, the
group of one rank, and what ranks compare when they start.

All ranks of a group call the same operations in the same order, with tensors of the same dtype. An operation begins at
its call; wait() of what it returns completes it. Tensors passed in must not be used in between.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from headrace.core.types.errors import ConfigError

ROWS = 64  # of the tensor by which ranks compare their sums


class LinkBroken(Exception):
    """The connection to another rank is lost. The group cannot go on and is restarted as a whole."""


@contextmanager
def breakable() -> Iterator[None]:
    """Turn the RuntimeError that torch.distributed raises for a lost connection into LinkBroken, and the ValueError for
    a group that was aborted. Their texts differ by backend."""
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(str(error)) from error
    except ValueError as error:
        if dist.is_initialized():
            raise
        raise LinkBroken(f"the group was aborted: {error}") from error


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


def check_equal_sums(group: Collectives, size: int, dtype: torch.dtype, device: str) -> None:
    """Sum a tensor [ROWS, size] over the group and compare a digest of the result.

    Ranks choose experts and samples by hidden states that are sums, so the sums have to be equal to the bit. Raises
    ConfigError on all ranks when they are not, LinkBroken when a rank is gone.
    """
    if group.size == 1:
        return
    generator = torch.Generator().manual_seed(group.rank)
    mine = torch.randn(ROWS, size, generator=generator).to(dtype=dtype, device=device)
    summed = group.all_reduce(mine).wait()
    digest = xxhash.xxh3_64_intdigest(summed.cpu().view(torch.uint8).numpy().tobytes())
    digests = _gathered(group, digest >> 1, device)  # 63 bits, for int64
    if len(set(digests)) > 1:
        shown = ", ".join(f"{each:x}" for each in digests)
        raise ConfigError(
            f"the {group.size} shards have different sums after one all-reduce (digests {shown}), so they would not "
            f"compute the same model; write --tp 1, or run all shards on the same kind of device with one version of "
            f"torch"
        )


def least(group: Collectives, value: int, device: str) -> int:
    """The least of the numbers that the ranks give, on all of them. Raises LinkBroken when a rank is gone."""
    return value if group.size == 1 else min(_gathered(group, value, device))


def _gathered(group: Collectives, value: int, device: str) -> list[int]:
    """The numbers of all ranks: a sum to which each gives its own, in its place."""
    values = torch.zeros(group.size, dtype=torch.int64, device=device)
    values[group.rank] = value
    return [int(each) for each in group.all_reduce(values).wait().tolist()]
