"""Mixture-of-experts MLP (arXiv 1701.06538): each token goes through the k experts that a router chooses for it.

No expert has a capacity and no token is dropped. Which rank computes which expert is the exchange's matter (exchange.py).
"""

from torch import Tensor

from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.exchange import Exchange
from headrace.engine.layers.experts import Experts
from headrace.engine.layers.router import Choice, Router
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader


class MoeMlp:
    """MLP block of a router, routed experts, and shared experts that every token goes through."""

    def __init__(
        self, moe: MoeSpec, hidden: int, read: LayerReader, arithmetic: Arithmetic, exchange: Exchange
    ) -> None:
        """Read the weights. hidden: hidden size. exchange: of the stage; says which experts to read. Raises ConfigError
        for a missing or misshapen tensor."""
        self._router = Router(moe, hidden, read, arithmetic)
        self._experts = Experts(moe, hidden, exchange.own(moe.experts), read, arithmetic)
        self._exchange = exchange
        self._shared: DenseMlp | None = None
        if moe.shared_size:
            self._shared = DenseMlp(hidden, moe.shared_size, read, arithmetic, f"{moe.module}.shared_experts")

    @property
    def rows(self) -> Tensor:
        """Rows computed by each expert of this rank: int64."""
        return self._experts.rows

    def forward(self, normed: Tensor) -> Tensor:
        """See MlpBlock."""
        return self._exchange.run(normed, self).to(normed.dtype)

    def route(self, x: Tensor) -> Choice:
        """See Mixture."""
        return self._router.route(x)

    def compute(self, x: Tensor, choice: Choice) -> Tensor:
        """See Mixture."""
        return self._experts.compute(x, choice)

    def add_shared(self, x: Tensor, sums: Tensor) -> None:
        """See Mixture."""
        if self._shared is not None and len(x):
            sums.add_(self._shared.forward(x))
