"""Experts of a mixture-of-experts layer: each computes the rows that were routed to it, one product per expert."""

from itertools import pairwise

import torch
from torch import Tensor

from headrace.engine.layers.choice import ExpertChoice
from headrace.engine.layers.exchange.ways import TILE_ROWS
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader


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
        gate, up, down = moe.projections
        inner = moe.intermediate_size
        self._arithmetic = arithmetic
        self._own = own
        self._tile_rows = tile_rows
        self._gate_up = []  # per own expert: [2 * inner, hidden]
        self._down = []  # [hidden, inner]
        for expert in own:
            name = f"{moe.module}.experts.{expert}"
            self._gate_up.append(read.matrix({f"{name}.{gate}": inner, f"{name}.{up}": inner}, hidden))
            self._down.append(read.matrix({f"{name}.{down}": hidden}, inner))
        self._edges: Tensor | None = None  # own experts' numbers and the next, on the device of the rows
        self.rows = torch.zeros(len(own), dtype=torch.int64)
        """Rows computed by each own expert; written by the compute thread, may be read by others."""

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
                gated = self._arithmetic.gated_linear(x.index_select(0, rows), self._gate_up[index])
                result = self._arithmetic.linear(gated, self._down[index]).float()
                sums.index_add_(0, rows, result.mul_(weights[tile]))
        return sums

    def _sorted(self, choice: ExpertChoice) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens and weights [rows, 1] in the order of experts, and where each own expert's rows begin and end."""
        if self._edges is None:
            self._edges = torch.arange(self._own.start, self._own.stop + 1, device=choice.experts.device)
        numbers, order = choice.experts.flatten().sort(stable=True)
        edges = torch.searchsorted(numbers, self._edges).cpu()
        self.rows += edges.diff()
        return order // choice.experts.shape[1], choice.weights.flatten()[order, None], edges.tolist()
