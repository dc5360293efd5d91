"""Interface of expert exchanges, and the exchange of a rank that holds all experts."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.choice import ExpertChoice


class Mixture(Protocol):
    """The parts of a mixture-of-experts layer on one rank."""

    def route(self, x: Tensor) -> ExpertChoice:
        """Choose the experts of rows [tokens, hidden size]."""
        ...

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Weighted sums of the results of this rank's experts: float32 [tokens, hidden size]."""
        ...

    def add_shared(self, x: Tensor, sums: Tensor) -> None:
        """Add the results of the shared experts to float32 sums [tokens, hidden size], in place."""
        ...


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
        """Sums over all experts for this replica's rows x [tokens, hidden size]: float32 [tokens, hidden size].

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
        sums = mixture.compute(x, mixture.route(x))
        mixture.add_shared(x, sums)
        return sums
