"""Expert exchange: brings tokens to the ranks that hold their experts, and the results back.

Three ways, by model/expert_plan.py: replicated tokens and one all-reduce; all-gather; all-to-all. A rank that holds all
experts exchanges nothing.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.collectives.operations import Collectives
from headrace.engine.collectives.steps import Steps
from headrace.engine.model.expert_choice import NO_EXPERT, ExpertChoice
from headrace.engine.model.expert_plan import TILE_TOKENS, WORD, Way, own_experts
from headrace.engine.model.moe_spec import MoeSpec


class Mixture(Protocol):
    """The parts of a mixture-of-experts layer on one rank."""

    @property
    def grouped(self) -> bool:
        """Whether experts are computed together, on a GPU, where a row's bits may follow from its place in a pass: what
        shared experts give may be added before sums over ranks."""
        ...

    @property
    def joined(self) -> bool:
        """Whether the shared experts are one of those that compute() computes."""
        ...

    def route(self, x: Tensor, shared: slice | None = None) -> ExpertChoice:
        """Choose the experts of rows [tokens, hidden size]. shared: rows that go to the shared experts, too, where
        these are joined."""
        ...

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the results of this rank's experts [tokens, hidden size]: in float32, on a GPU also in the
        dtype of x."""
        ...

    def shared(self, x: Tensor) -> Tensor | None:
        """Results of the shared experts [tokens, hidden size], in the dtype of x; None where there are none."""
        ...


def sums_of(x: Tensor, mixture: Mixture, shared: slice) -> Tensor:
    """Sums over this rank's experts for rows x, and its shared experts' results for some of them."""
    if mixture.joined:
        return mixture.compute(x, mixture.route(x, shared))
    sums = mixture.compute(x, mixture.route(x))
    if (results := mixture.shared(x[shared])) is not None:
        sums[shared].add_(results)
    return sums


class Exchange(Protocol):
    """How the ranks of a stage share the experts of its layers; one for all layers, used by one thread.

    Where passes are cut in halves each half has an exchange of its own, with communicators of its own.
    """

    @property
    def own(self) -> range:
        """The experts of a layer that this rank holds."""
        ...

    def begin(self, tokens: Sequence[int], padded: int = 0) -> None:
        """Begin a forward pass. tokens: of every replica; padded: the count that exchange buffers are filled up to,
        where they are. All ranks of the stage have to be given the same numbers; exchanges of equal padded counts pause
        equally often."""
        ...

    def run(self, x: Tensor, mixture: Mixture) -> Steps[Tensor]:
        """Sums over all experts for this replica's rows x [tokens, hidden size], as of Mixture.compute().

        Pauses while rows travel to the experts and back. A replica without tokens takes part too: its experts work for
        the others. Raises LinkBroken when another rank is gone.
        """
        ...


class NoExchange:
    """Exchange of a rank that holds all experts."""

    def __init__(self, experts: int) -> None:
        """experts: of a layer."""
        self.own = range(experts)

    def begin(self, tokens: Sequence[int], padded: int = 0) -> None:
        """See Exchange."""

    def run(self, x: Tensor, mixture: Mixture) -> Steps[Tensor]:
        """See Exchange."""
        yield from ()  # nothing travels
        return sums_of(x, mixture, slice(0, len(x)))


def pack(x: Tensor, choice: ExpertChoice, rows: int = 0) -> Tensor:
    """Parcels int32 [..., rows, words] of x [tokens, hidden size], whose size in bytes is a multiple of 4.

    choice: experts [..., tokens, k], of the parcels for each of several ranks. rows: filled up to this many with rows
    without experts; 0 adds none.
    """
    hidden, k = x.shape[1] * x.element_size() // WORD, choice.experts.shape[-1]
    shape = (*choice.experts.shape[:-2], max(rows, len(x)), hidden + 2 * k)
    parcels = torch.empty(shape, dtype=torch.int32, device=x.device)
    there, padding = parcels[..., : len(x), :], parcels[..., len(x) :, :]
    there[..., :hidden] = x.contiguous().view(torch.int32)
    there[..., hidden : hidden + k] = choice.experts
    there[..., hidden + k :] = choice.weights.view(torch.int32)
    padding.zero_()
    padding[..., hidden : hidden + k] = NO_EXPERT
    return parcels


def unpack(parcels: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, ExpertChoice]:
    """Hidden states of this dtype, experts and weights of parcels."""
    hidden = parcels.shape[1] - 2 * k
    weights = parcels[:, hidden + k :].contiguous().view(torch.float32)
    return parcels[:, :hidden].view(dtype), ExpertChoice(parcels[:, hidden : hidden + k].long(), weights)


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
        if mixture.grouped:
            mine = shard_rows(len(x), self._tp.size, self._tp.rank)
            summed = self._tp.all_reduce(sums_of(x, mixture, mine))
            yield
            return summed.wait()
        shared = SharedResults(x, mixture, self._tp)
        summed = self._tp.all_reduce(mixture.compute(x, mixture.route(x)))
        yield
        return shared.add_to(summed.wait())


def shard_rows(tokens: int, shards: int, shard: int) -> slice:
    """The rows of a replica's tokens for which a shard does what is done once per token."""
    return slice(tokens * shard // shards, tokens * (shard + 1) // shards)


class GatheredRows:
    """Rows of which each shard gives those of its slice of a replica's tokens, on their way to all shards; a Pending.

    They travel as bytes, filled up to the longest slice.
    """

    def __init__(self, mine: Tensor, tokens: int, tp: Collectives) -> None:
        """mine: rows [rows, elements] of this shard, whose size in bytes is a multiple of 4. tokens: of the replica."""
        self._slices = [shard_rows(tokens, tp.size, shard) for shard in range(tp.size)]
        self._longest = max(len(range(tokens)[rows]) for rows in self._slices)
        self._dtype = mine.dtype
        words = mine.contiguous().view(torch.int32)
        padded = words.new_zeros(self._longest, words.shape[1])
        padded[: len(words)] = words
        self._gathered = tp.all_gather(padded)

    def wait(self) -> Tensor:
        """The rows of all tokens, in order. See Pending."""
        parts = torch.split(self._gathered.wait(), self._longest)
        rows = [part[: each.stop - each.start] for part, each in zip(parts, self._slices, strict=True)]
        return torch.cat(rows).view(self._dtype)


class SharedResults:
    """Results of the shared experts for a replica's tokens, each computed by one shard; on their way to all of them.

    They are added once the experts' sums are summed over the shards: a term added before would take its place in the
    order of float additions by its row's place in the pass.
    """

    def __init__(self, x: Tensor, mixture: Mixture, tp: Collectives) -> None:
        """x: the replica's rows [tokens, hidden size], one or more."""
        mine = mixture.shared(x[shard_rows(len(x), tp.size, tp.rank)])
        self._rows = None if mine is None else GatheredRows(mine, len(x), tp)

    def add_to(self, sums: Tensor) -> Tensor:
        """Add them to float32 sums [tokens, hidden size], which are returned. Raises LinkBroken, see Pending."""
        return sums if self._rows is None else sums.add_(self._rows.wait())


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
        shared = SharedResults(x, mixture, self._tp) if len(x) else None
        for first in range(0, self._padded, self._tile):
            rows = slice(first, first + self._tile)
            part = yield from self._exchange(x[rows], min(self._tile, self._padded - first), mixture)
            sums[rows] = part[: len(sums[rows])]
        if shared is None:
            return sums  # the other shards of an idle replica know it too
        return shared.add_to(self._tp.all_reduce(sums).wait())

    def _exchange(self, x: Tensor, padded: int, mixture: Mixture) -> Steps[Tensor]:
        """This rank's part of the sums for rows x of its replica, filled up to a padded count."""
        choice = mixture.route(x)
        dispatched = self._dp.all_gather(pack(x, choice, padded))
        yield
        results = mixture.compute(*unpack(dispatched.wait(), choice.experts.shape[1], x.dtype))
        combined = self._dp.reduce_scatter(results)
        yield
        return combined.wait()


class AllToAll:
    """Experts divided among the ranks of all replicas of a stage.

    The experts of a token are chosen by exactly one rank: each shard routes its slice of the replica's tokens. A token
    goes once to a rank, however many of its experts that has, and comes back as one row.

    On the CPU it goes to no other rank. How many rows a rank is sent is known to a GPU alone, and asking it would hold
    up all that is queued: there every rank is sent as many rows as the longest slice has, and those of tokens without
    an expert of its are not computed.
    """

    def __init__(
        self, moe: MoeSpec, tp: Collectives, ep: Collectives, tile_tokens: int = TILE_TOKENS, device: str = "cpu"
    ) -> None:
        """tp: shards of this replica. ep: all ranks of the stage, by replica and shard."""
        held = [own_experts(moe.experts, ep.size, rank) for rank in range(ep.size)]
        self._k = moe.top_k
        self.own = held[ep.rank]
        self._tp = tp
        self._ep = ep
        self._tile = tile_tokens
        self._exchange = self._counted if device == "cpu" else self._padded
        firsts = torch.tensor([owned.start for owned in held], device=device)[:, None, None]
        ends = torch.tensor([owned.stop for owned in held], device=device)[:, None, None]
        self._held = (firsts, ends)  # experts of each rank
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
            yield from self._exchange(mine[rows], mixture, sums[rows], min(self._tile, self._longest - first))
        if (shared := mixture.shared(mine)) is not None:
            sums.add_(shared)
        return GatheredRows(sums, len(x), self._tp).wait() if len(x) else sums

    def _of_ranks(self, experts: Tensor) -> Tensor:
        """Which of the experts [tokens, k] each rank has, NO_EXPERT for others: [ranks, tokens, k]."""
        firsts, ends = self._held
        return experts.masked_fill((experts < firsts) | (experts >= ends), NO_EXPERT)

    def _counted(self, x: Tensor, mixture: Mixture, sums: Tensor, longest: int) -> Steps[None]:
        """Add the results of all ranks' experts for rows x to their sums. longest: rows of any rank."""
        choice = mixture.route(x)
        of_ranks = self._of_ranks(choice.experts)
        asked = (of_ranks != NO_EXPERT).any(-1)
        tokens = asked.nonzero()[:, 1]  # in order of rank, then of token
        sent = asked.sum(1, dtype=torch.int32)
        one_each = [1] * self._ep.size
        received: list[int] = self._ep.all_to_all(sent, one_each, one_each).wait().tolist()
        counts: list[int] = sent.tolist()
        parcels = pack(x[tokens], ExpertChoice(of_ranks[asked], choice.weights[tokens]))
        combined = yield from self._results(mixture, x.dtype, parcels, counts, received)
        by_rank = zip(torch.split(tokens, counts), torch.split(combined, counts), strict=True)
        for rows, of_rank in by_rank:
            sums.index_add_(0, rows, of_rank.to(sums.dtype))  # rank by rank, so that the order of additions is fixed

    def _padded(self, x: Tensor, mixture: Mixture, sums: Tensor, longest: int) -> Steps[None]:
        """As _counted()."""
        choice = mixture.route(x)
        parcels = pack(x, choice._replace(experts=self._of_ranks(choice.experts)), longest)
        each = [longest] * self._ep.size
        combined = yield from self._results(mixture, x.dtype, parcels.flatten(0, 1), each, each)
        for of_rank in combined.view(self._ep.size, longest, -1)[:, : len(x)]:
            sums.add_(of_rank)

    def _results(
        self, mixture: Mixture, dtype: torch.dtype, parcels: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Steps[Tensor]:
        """Results of the ranks for parcels of rows of this dtype. sent, received: how many to and from each rank."""
        dispatched = self._ep.all_to_all(parcels, sent, received)
        yield
        results = mixture.compute(*unpack(dispatched.wait(), self._k, dtype))
        combined = self._ep.all_to_all(results, received, sent)
        yield
        return combined.wait()


def begin_pass(exchanges: Sequence[Exchange], tokens: Sequence[int], padded: int, cut: int = 0) -> None:
    """Begin a forward pass, see Exchange.begin(). exchanges: of the whole pass, or of both halves of one that is cut.
    cut: tokens of the first half of each replica; 0: not cut.

    Both halves are padded to the longer one, so that they exchange equally often and the second never gets ahead of
    the first.
    """
    if cut:
        exchanges[0].begin([cut] * len(tokens), padded - cut)
        exchanges[1].begin([each - cut for each in tokens], padded - cut)
    else:
        exchanges[0].begin(tokens, padded)


def make_exchange(
    way: Way, moe: MoeSpec, tp: Collectives, dp: Collectives, ep: Collectives, device: str = "cpu"
) -> Exchange:
    """The exchange of one rank. tp: shards of its replica. dp: ranks of the same shard of all replicas. ep: all ranks
    of its stage, by replica and shard. device: of the rows."""
    match way:
        case "replicated":
            return Replicated(moe.experts, tp)
        case "allgather":
            return AllGather(moe.experts, tp, dp)
        case "alltoall":
            return AllToAll(moe, tp, ep, device=device)
