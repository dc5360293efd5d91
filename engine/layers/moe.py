"""Mixture-of-experts MLP (arXiv 1701.06538): each token goes through the k experts that a router chooses for it.

No expert has a capacity and no token is dropped. The exchange decides which rank computes which expert (exchange.py).
"""

from collections.abc import Sequence

from torch import Tensor

from headrace.engine.collectives.steps import Steps, finish
from headrace.engine.layers.choice import ExpertChoice
from headrace.engine.layers.exchange.base import Exchange
from headrace.engine.layers.experts import Experts
from headrace.engine.layers.router import Router
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader


class MoeMlp:
    """MLP block of a router, routed experts, and shared experts that every token goes through."""

    exchanges = True

    def __init__(
        self, moe: MoeSpec, hidden: int, read: LayerReader, arithmetic: Arithmetic, exchanges: Sequence[Exchange]
    ) -> None:
        """Read the weights. hidden: hidden size. exchanges: of the stage, one for each half of passes that are cut; the
        first says which experts to read. Raises ConfigError for a missing or misshapen tensor."""
        self._router = Router(moe, hidden, read, arithmetic)
        self._experts = Experts(moe, hidden, exchanges[0].own, read, arithmetic)
        self._exchanges = exchanges
        self._shared = SharedExperts(moe, hidden, read, arithmetic) if moe.shared_size else None

    @property
    def rows(self) -> Tensor:
        """Rows computed by each expert of this rank: int64."""
        return self._experts.rows

    def forward(self, normed: Tensor) -> Tensor:
        """The result of steps() in a pass that is not cut."""
        return finish(self.steps(normed))

    def steps(self, normed: Tensor, half: int = 0) -> Steps[Tensor]:
        """See MlpBlock."""
        sums = yield from self._exchanges[half].run(normed, self)
        return sums.to(normed.dtype)

    def route(self, x: Tensor) -> ExpertChoice:
        """See Mixture."""
        return self._router.route(x)

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """See Mixture."""
        return self._experts.compute(x, choice)

    def add_shared(self, x: Tensor, sums: Tensor) -> None:
        """See Mixture."""
        if self._shared is not None and len(x):
            sums.add_(self._shared.compute(x))


class SharedExperts:
    """Experts that every token goes through, joined to one SwiGLU MLP."""

    def __init__(self, moe: MoeSpec, hidden: int, read: LayerReader, arithmetic: Arithmetic) -> None:
        """Read the weights. Raises ConfigError for a missing or misshapen tensor."""
        name, inner = f"{moe.module}.shared_experts", moe.shared_size
        self._arithmetic = arithmetic
        self._gate_up = read.matrix({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden)
        self._down = read.matrix({f"{name}.down_proj": hidden}, inner)

    def compute(self, x: Tensor) -> Tensor:
        """Results for rows [tokens, hidden size]."""
        return self._arithmetic.linear(self._arithmetic.gated_linear(x, self._gate_up), self._down)
