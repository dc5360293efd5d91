"""Exchange of shards that all have all tokens: each computes its experts of all of them, and the results are added."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.collectives.base import Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.exchange.base import Mixture
from headrace.engine.layers.exchange.ways import own_experts


class Replicated:
    """Experts divided among the tensor-parallel shards of one replica; one all-reduce per layer."""

    def __init__(self, experts: int, tp: Collectives) -> None:
        """experts: of a layer. tp: the shards."""
        self.own = own_experts(experts, tp.size, tp.rank)
        self._tp = tp

    def begin(self, tokens: Sequence[int], padded: int = 0) -> None:
        """See Exchange."""

    def run(self, x: Tensor, mixture: Mixture) -> Steps[Tensor]:
        """See Exchange."""
        if not len(x):
            return x.new_empty(x.shape, dtype=torch.float32)
        sums = mixture.compute(x, mixture.route(x))
        add_shared(x, mixture, sums, self._tp)
        summed = self._tp.all_reduce(sums)
        yield
        return summed.wait()


def shard_rows(tokens: int, shards: int, shard: int) -> slice:
    """The rows of a replica's tokens for which a shard does what is done once per token."""
    return slice(tokens * shard // shards, tokens * (shard + 1) // shards)


def add_shared(x: Tensor, mixture: Mixture, sums: Tensor, tp: Collectives) -> None:
    """Add the shared experts' results to this shard's rows of sums, which are added over all shards afterwards."""
    mine = shard_rows(len(x), tp.size, tp.rank)
    mixture.add_shared(x[mine], sums[mine])
