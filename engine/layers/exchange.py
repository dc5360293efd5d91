"""Expert exchange: brings tokens to the ranks that hold their experts, and the results back."""

from typing import Protocol

from torch import Tensor

from headrace.engine.layers.router import Choice


class Mixture(Protocol):
    """The parts of a mixture-of-experts layer on one rank."""

    def route(self, x: Tensor) -> Choice:
        """Choose the experts of rows [tokens, hidden size]."""
        ...

    def compute(self, x: Tensor, choice: Choice) -> Tensor:
        """Weighted sums of the results of this rank's experts: float32 [tokens, hidden size]."""
        ...

    def add_shared(self, x: Tensor, sums: Tensor) -> None:
        """Add the results of the shared experts to float32 sums [tokens, hidden size], in place."""
        ...


class Exchange(Protocol):
    """How the ranks of a stage share the experts of its layers; one for all layers."""

    def own(self, experts: int) -> range:
        """The experts that this rank holds, of so many in a layer."""
        ...

    def run(self, x: Tensor, mixture: Mixture) -> Tensor:
        """Sums over all experts for this replica's rows x [tokens, hidden size]: float32 [tokens, hidden size]."""
        ...


class NoExchange:
    """Exchange of a rank that holds all experts."""

    def own(self, experts: int) -> range:
        """See Exchange."""
        return range(experts)

    def run(self, x: Tensor, mixture: Mixture) -> Tensor:
        """See Exchange."""
        sums = mixture.compute(x, mixture.route(x))
        mixture.add_shared(x, sums)
        return sums
