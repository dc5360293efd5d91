"""Exchange by all-gather: every rank gets the tokens of all replicas and computes its experts of all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.collectives.base import Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.exchange.base import Mixture
from headrace.engine.layers.exchange.parcels import pack, unpack
from headrace.engine.layers.exchange.replicated import add_shared
from headrace.engine.layers.exchange.ways import TILE_TOKENS, own_experts


class AllGather:
    """Experts divided among the ranks of all replicas of a stage.

    Per layer and tile: all-gather of padded rows over the replicas, and reduce-scatter of the results; then one
    all-reduce over the shards. Padded rows have no experts and are not computed.
    """

    def __init__(self, experts: int, tp: Collectives, dp: Collectives, tile_tokens: int = TILE_TOKENS) -> None:
        """experts: of a layer. tp: shards of this replica. dp: ranks of the same shard of all replicas."""
        self.own = own_experts(experts, dp.size * tp.size, dp.rank * tp.size + tp.rank)
        self._tp = tp
        self._dp = dp
        self._tile = tile_tokens
        self._padded = 0

    def begin(self, tokens: Sequence[int], padded: int = 0) -> None:
        """See Exchange. Raises ValueError for a padded count below that of a replica."""
        if padded < max(tokens):
            raise ValueError(f"{max(tokens)} tokens of a replica do not fit into a padded count of {padded}")
        self._padded = padded

    def run(self, x: Tensor, mixture: Mixture) -> Steps[Tensor]:
        """See Exchange."""
        sums = x.new_empty(x.shape, dtype=torch.float32)
        for first in range(0, self._padded, self._tile):
            rows = slice(first, first + self._tile)
            part = yield from self._exchange(x[rows], min(self._tile, self._padded - first), mixture)
            sums[rows] = part[: len(sums[rows])]
        if not len(x):
            return sums  # the other shards of an idle replica know it too
        add_shared(x, mixture, sums, self._tp)
        return self._tp.all_reduce(sums).wait()

    def _exchange(self, x: Tensor, padded: int, mixture: Mixture) -> Steps[Tensor]:
        """This rank's part of the sums for rows x of its replica, filled up to a padded count."""
        choice = mixture.route(x)
        dispatched = self._dp.all_gather(pack(x, choice, padded))
        yield
        results = mixture.compute(*unpack(dispatched.wait(), choice.experts.shape[1], x.dtype))
        combined = self._dp.reduce_scatter(results)
        yield
        return combined.wait()
