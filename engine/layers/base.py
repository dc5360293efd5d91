"""Interfaces of the two blocks of a decoder layer, as the decoder calls them."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headrace.engine.attention.paged import AttentionPass
from headrace.engine.collectives.operations import Pending
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.lora import Groups


class Rotary(NamedTuple):
    """Rotary embedding of the rows of a forward pass: float32 [tokens, 1, width] each, from rotary_tables."""

    cos: Tensor
    sin: Tensor


class AttentionBlock(Protocol):
    """Projections, rotary embedding and attention of one layer."""

    def post(
        self, layer: int, normed: Tensor, rotary: Rotary, attention: AttentionPass, groups: Groups = ()
    ) -> Pending:
        """Compute, and begin the sum over all shards.

        layer: counted from the stage's first. normed: [tokens, hidden size], after the layer's first norm. groups: rows
        that go through adapters. The result is added to the residual stream: [tokens, hidden size], on every shard the
        sum over all. Raises LinkBroken when another shard is gone."""
        ...


class MlpBlock(Protocol):
    """Feed-forward part of one layer."""

    @property
    def exchanges(self) -> bool:
        """Whether rows go to experts of other ranks."""
        ...

    def steps(self, normed: Tensor, half: int = 0, groups: Groups = ()) -> Steps[Tensor]:
        """normed: [tokens, hidden size], after the layer's second norm. half: of the forward pass, where it is cut.
        groups: rows that go through adapters.

        Returns what is added to the residual stream, [tokens, hidden size]: on every shard the sum over all. Raises
        LinkBroken when another rank is gone."""
        ...
