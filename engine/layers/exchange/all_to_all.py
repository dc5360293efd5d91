"""Exchange by all-to-all: every token goes to the ranks that hold its experts, and to no other.

shard's rows ─route─► parcels ══counts, rows══► own experts ══results══► sums, in order of rank ══► all shards
                                all-to-all                  all-to-all                          all-gather
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.collectives.base import Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.choice import NO_EXPERT, ExpertChoice
from headrace.engine.layers.exchange.base import Mixture
from headrace.engine.layers.exchange.parcels import pack, unpack
from headrace.engine.layers.exchange.replicated import shard_rows
from headrace.engine.layers.exchange.ways import TILE_TOKENS, own_experts


class AllToAll:
    """Experts divided among the ranks of all replicas of a stage, without padding.

    The experts of a token are chosen by exactly one rank: each shard routes its slice of the replica's tokens. A token
    goes once to a rank, however many of its experts that has, and comes back as one row.
    """

    def __init__(self, experts: int, tp: Collectives, ep: Collectives, tile_tokens: int = TILE_TOKENS) -> None:
        """experts: of a layer. tp: shards of this replica. ep: all ranks of the stage, by replica and shard."""
        held = [own_experts(experts, ep.size, rank) for rank in range(ep.size)]
        self.own = held[ep.rank]
        self._tp = tp
        self._ep = ep
        self._tile = tile_tokens
        self._rank_of = torch.tensor([rank for rank, owned in enumerate(held) for _ in owned])  # by expert
        self._longest = 0  # tokens of the longest slice of any rank in this pass

    def begin(self, tokens: Sequence[int], padded: int = 0) -> None:
        """See Exchange."""
        self._longest = -(-max(*tokens, padded) // self._tp.size)

    def run(self, x: Tensor, mixture: Mixture) -> Steps[Tensor]:
        """See Exchange."""
        mine = x[shard_rows(len(x), self._tp.size, self._tp.rank)]
        sums = torch.zeros(mine.shape, dtype=torch.float32, device=x.device)
        for first in range(0, self._longest, self._tile):
            rows = slice(first, first + self._tile)
            yield from self._exchange(mine[rows], mixture, sums[rows])
        mixture.add_shared(mine, sums)
        return self._all_rows(sums, len(x))

    def _exchange(self, x: Tensor, mixture: Mixture, sums: Tensor) -> Steps[None]:
        """Add the results of all ranks' experts for rows x to their sums."""
        choice = mixture.route(x)
        self._rank_of = self._rank_of.to(x.device)
        owners = self._rank_of[choice.experts]  # [tokens, k]
        asked = torch.zeros(self._ep.size, len(x), dtype=torch.bool, device=x.device)
        asked.scatter_(0, owners.T, True)
        ranks, tokens = asked.nonzero().unbind(1)  # in order of rank, then of token
        elsewhere = owners[tokens] != ranks[:, None]
        parts = ExpertChoice(choice.experts[tokens].masked_fill_(elsewhere, NO_EXPERT), choice.weights[tokens])
        sent = asked.sum(1, dtype=torch.int32)
        one_each = [1] * self._ep.size
        received: list[int] = self._ep.all_to_all(sent, one_each, one_each).wait().tolist()
        counts: list[int] = sent.tolist()
        dispatched = self._ep.all_to_all(pack(x[tokens], parts), counts, received)
        yield
        results = mixture.compute(*unpack(dispatched.wait(), choice.experts.shape[1], x.dtype))
        combined = self._ep.all_to_all(results, received, counts)
        yield
        by_rank = zip(torch.split(tokens, counts), torch.split(combined.wait(), counts), strict=True)
        for rows, of_rank in by_rank:
            sums.index_add_(0, rows, of_rank)  # rank by rank, so that the order of additions is fixed

    def _all_rows(self, sums: Tensor, tokens: int) -> Tensor:
        """The sums of all shards' slices of the replica's tokens, in order."""
        if self._tp.size == 1 or not tokens:
            return sums
        shards = self._tp.size
        slices = [len(range(tokens)[shard_rows(tokens, shards, shard)]) for shard in range(shards)]
        longest = max(slices)
        padded = sums.new_zeros(longest, sums.shape[1])
        padded[: len(sums)] = sums
        gathered = torch.split(self._tp.all_gather(padded).wait(), longest)
        return torch.cat([rows[:count] for rows, count in zip(gathered, slices, strict=True)])
