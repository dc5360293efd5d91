"""Mixture-of-experts MLP (arXiv 1701.06538): each token goes through the k experts that a router chooses for it.

No expert has a capacity and no token is dropped. The exchange decides which rank computes which expert (exchange.py).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.collectives.steps import Steps, finish
from headrace.engine.layers.exchange import Exchange, Mixture, NoExchange, Replicated
from headrace.engine.layers.grouped_experts import GroupedExperts, can_group, read_expert
from headrace.engine.layers.lora import Groups
from headrace.engine.layers.router import Router
from headrace.engine.model.arithmetic import Arithmetic, Rows
from headrace.engine.model.expert_choice import NO_EXPERT, ExpertChoice
from headrace.engine.model.expert_plan import TILE_ROWS
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader


class ExpertRows:
    """Rows computed by each expert of a rank in each of its layers that has experts. The compute thread counts, on the
    device; other threads may read."""

    def __init__(self, first: int, mixtures: Mapping[int, "MoeMlp"]) -> None:
        """first: of this rank's experts. mixtures: by layer, counted from the model's first; one or more."""
        self.layers = tuple(mixtures)
        """Counted from the model's first."""
        self.first = first
        """The first of this rank's experts."""
        self._counted = torch.stack([mixture.counts for mixture in mixtures.values()])
        for mixture, counts in zip(mixtures.values(), self._counted, strict=True):
            mixture.count_in(counts)
        on_host = self._counted.device.type == "cpu"
        self._host = self._counted if on_host else torch.zeros(self._counted.shape, dtype=torch.int64, pin_memory=True)

    def publish(self) -> None:
        """Have what was counted copied to the host, without waiting for it: at the end of a pass."""
        if self._host is not self._counted:
            self._host.copy_(self._counted, non_blocking=True)

    def counts(self) -> NDArray[np.int64]:
        """A copy: int64 [layers, experts]; as of the last publish() that the device has come to."""
        return self._host.numpy().copy()


class Experts:
    """SwiGLU MLPs, of which this rank holds a range, and the count of rows that each has computed."""

    def __init__(
        self,
        moe: MoeSpec,
        hidden: int,
        own: range,
        read: LayerReader,
        arithmetic: Arithmetic,
        tile_rows: int = TILE_ROWS,
    ) -> None:
        """Read the weights, expert by expert. own: the experts that this rank holds. Raises ConfigError for a missing
        or misshapen tensor."""
        self._arithmetic = arithmetic
        self._own = own
        self._tile_rows = tile_rows
        self._experts = [read_expert(moe, hidden, expert, read) for expert in own]
        self._edges: Tensor | None = None  # own experts' numbers and the next, on the device of the rows
        self.counts = torch.zeros(len(own), dtype=torch.int64)
        """Rows computed by each own expert, on the host."""

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the own experts' results for rows x [tokens, hidden size]: float32 [tokens, hidden size].

        Results of a token are added in ascending order of experts, so its sum does not depend on the other tokens.
        """
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not choice.experts.numel():
            return sums
        tokens, weights, bounds = self._sorted(choice)
        for index, (start, stop) in enumerate(pairwise(bounds)):
            for first in range(start, stop, self._tile_rows):
                tile = slice(first, min(first + self._tile_rows, stop))
                rows = tokens[tile]
                gated = self._arithmetic.gated_linear(x.index_select(0, rows), self._experts[index].gate_up)
                result = self._arithmetic.linear(gated, self._experts[index].down).float()
                sums.index_add_(0, rows, result.mul_(weights[tile]))
        return sums

    def _sorted(self, choice: ExpertChoice) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens and weights [rows, 1] in the order of experts, and where each own expert's rows begin and end."""
        if self._edges is None:
            self._edges = torch.arange(self._own.start, self._own.stop + 1, device=choice.experts.device)
        tokens, weights, bounds = rows_by_expert(choice, self._edges)
        self.counts += bounds.diff()
        return tokens, weights, bounds.tolist()


def rows_by_expert(choice: ExpertChoice, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in the order of the experts that compute them, of each expert in the order of tokens.

    edges: consecutive experts' numbers and the next. Returns tokens int64 [rows], weights [rows, 1], and where each
    expert's rows begin and end, on the host: int64 [experts + 1].
    """
    numbers, order = choice.experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(numbers, edges).cpu()
    return order // choice.experts.shape[1], choice.weights.flatten()[order, None], bounds


class MoeMlp:
    """MLP block of a router, routed experts, and shared experts that every token goes through."""

    exchanges = True

    def __init__(
        self, moe: MoeSpec, hidden: int, read: LayerReader, arithmetic: Arithmetic, exchanges: Sequence[Exchange]
    ) -> None:
        """Read the weights. hidden: hidden size. exchanges: of the stage, one for each half of passes that are cut; the
        first says which experts to read. Raises ConfigError for a missing or misshapen tensor."""
        self._arithmetic = arithmetic
        self._router = Router(moe, hidden, read, arithmetic)
        shared, own = read_expert(moe, hidden, None, read) if moe.shared_size else None, exchanges[0].own
        self._experts: GroupedExperts | Experts
        if can_group(moe, hidden, read):
            self._experts = GroupedExperts(moe, hidden, own, read, arithmetic, shared)
            shared = self._experts.shared or shared
        else:
            self._experts = Experts(moe, hidden, own, read, arithmetic)
        self._arithmetic = arithmetic
        self._shared = shared
        self._exchanges = exchanges

    @property
    def counts(self) -> Tensor:
        """Rows computed by each expert of this rank: int64 [experts], where rows are computed without a copy to the
        host on the device."""
        return self._experts.counts

    def count_in(self, counts: Tensor) -> None:
        """Count them there from now on."""
        self._experts.counts = counts

    @property
    def fixed(self) -> bool:
        """See MlpBlock."""
        return self.grouped and isinstance(self._exchanges[0], NoExchange | Replicated)

    def forward(self, normed: Tensor) -> Tensor:
        """The result of steps() in a pass that is not cut."""
        return finish(self.steps(normed))

    def steps(
        self,
        normed: Rows,
        half: int = 0,
        groups: Groups = (),
        padding: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Steps[Tensor]:
        """See MlpBlock. No adapter changes it, and it adds to no residual stream."""
        mixture: Mixture = self if padding is None else PaddedMixture(self, padding)
        rows = self._arithmetic.normed(normed)
        sums = yield from self._exchanges[half].run(rows, mixture)
        return sums.to(rows.dtype)

    @property
    def grouped(self) -> bool:
        """See Mixture."""
        return isinstance(self._experts, GroupedExperts)

    @property
    def joined(self) -> bool:
        """See Mixture."""
        return isinstance(self._experts, GroupedExperts) and self._experts.shared is not None

    def route(self, x: Tensor, shared: slice | None = None) -> ExpertChoice:
        """See Mixture."""
        return self._router.route(x, shared)

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """See Mixture."""
        return self._experts.compute(x, choice)

    def shared(self, x: Tensor) -> Tensor | None:
        """See Mixture."""
        if self._shared is None:
            return None
        if not len(x):
            return torch.empty_like(x)
        return self._arithmetic.linear(self._arithmetic.gated_linear(x, self._shared.gate_up), self._shared.down)


class PaddedMixture:
    """A Mixture of whose rows some are padding, which no expert computes or counts."""

    def __init__(self, mixture: MoeMlp, padding: Tensor) -> None:
        """padding: bool [tokens, 1]."""
        self._padding = padding
        self._route = mixture.route
        self.compute, self.shared = mixture.compute, mixture.shared
        self.grouped, self.joined = mixture.grouped, mixture.joined

    def route(self, x: Tensor, shared: slice | None = None) -> ExpertChoice:
        """See Mixture."""
        choice = self._route(x, shared)
        return choice._replace(experts=choice.experts.masked_fill(self._padding, NO_EXPERT))
