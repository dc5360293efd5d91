"""Collective operations by torch.distributed: NCCL on GPUs, Gloo on the CPU."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from headrace.engine.collectives.operations import breakable
from headrace.engine.collectives.watch import OperationWatch

# Before torch 2.12 they have other names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Started(NamedTuple):
    """An operation of torch.distributed under way."""

    work: dist.Work
    result: Tensor
    kept: object  # what the operation reads until it is done

    def wait(self) -> Tensor:
        """See Pending."""
        with breakable():
            self.work.wait()
        return self.result


class TorchCollectives:
    """Collectives over a process group. Used by one thread."""

    def __init__(self, group: dist.ProcessGroup, watch: OperationWatch | None = None) -> None:
        """watch: is told of every operation."""
        self._group = group
        self._watch = watch
        self.size = group.size()
        self.rank = group.rank()

    def all_reduce(self, x: Tensor) -> _Started:
        """See Collectives."""
        with breakable():
            work = dist.all_reduce(x, group=self._group, async_op=True)
        return self._started("all_reduce", work, x)

    def all_gather(self, x: Tensor) -> _Started:
        """See Collectives."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with breakable():
            work = _all_gather(gathered, x.contiguous(), group=self._group, async_op=True)
        return self._started("all_gather", work, gathered, x)

    def reduce_scatter(self, x: Tensor) -> _Started:
        """See Collectives."""
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with breakable():
            work = _reduce_scatter(part, x.contiguous(), group=self._group, async_op=True)
        return self._started("reduce_scatter", work, part, x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> _Started:
        """See Collectives."""
        rows = x.new_empty(sum(received), *x.shape[1:])
        with breakable():
            work = dist.all_to_all_single(
                rows, x.contiguous(), list(received), list(sent), group=self._group, async_op=True
            )
        return self._started("all_to_all", work, rows, x)

    def broadcast(self, x: Tensor, source: int) -> _Started:
        """See Collectives."""
        with breakable():
            work = dist.broadcast(x, group=self._group, group_src=source, async_op=True)
        return self._started("broadcast", work, x)

    def gather(self, x: Tensor, destination: int) -> _Started:
        """See Collectives."""
        rows = self.size * x.shape[0] if self.rank == destination else 0
        gathered = x.new_empty(rows, *x.shape[1:])
        parts = list(gathered.chunk(self.size)) if rows else None
        with breakable():
            work = dist.gather(x.contiguous(), parts, group=self._group, group_dst=destination, async_op=True)
        return self._started("gather", work, gathered, x)

    def _started(self, operation: str, work: dist.Work | None, result: Tensor, kept: object = None) -> _Started:
        started = _Started(begun(work), result, kept)
        if self._watch is not None:
            self._watch.add(operation, self._group.group_desc, started.work)
        return started


def begun(work: dist.Work | None) -> dist.Work:
    """The operation that torch.distributed has begun; it is None in processes outside of the group."""
    assert work is not None, "this process is in the group"
    return work


def make_group(
    ranks: Sequence[int], timeout_s: float, backend: str | None = None, name: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks. All ranks of the world have to call this, in the same order for all groups. Raises
    LinkBroken when a rank is gone.

    backend: of torch.distributed; None for the world's. name: what it is for, in logs of torch.
    """
    # Where the world is bound to devices, ranks outside of a group take part in a split of NCCL's communicator; those
    # inside of one with another backend do not, and would be waited for without end.
    members_only = backend not in (None, dist.get_backend()) and len(ranks) < dist.get_world_size()
    with breakable():
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=members_only,
            group_desc=name,
        )
        return group
