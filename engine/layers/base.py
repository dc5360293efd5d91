"""Interfaces of the two blocks of a decoder layer, as the decoder calls them."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headrace.engine.attention.paged import AttentionPass
from headrace.engine.collectives.operations import Pending
from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.lora import Groups
from headrace.engine.model.arithmetic import Rows, Stream


class Rotary(NamedTuple):
    """Rotary embedding of the rows of a forward pass: float32 [tokens, 1, width] each, from rotary_tables."""

    cos: Tensor
    sin: Tensor


class AttentionBlock(Protocol):
    """Projections, rotary embedding and attention of one layer. Beside attention itself it queues the same operations
    for any pass of as many tokens: CUDA graphs can be captured of them."""

    def post(
        self,
        layer: int,
        normed: Rows,
        rotary: Rotary,
        attention: AttentionPass,
        groups: Groups = (),
        hidden: Tensor | None = None,
    ) -> Pending | Stream:
        """Compute, and begin the sum over all shards.

        layer: counted from the stage's first. normed: [tokens, hidden size], after the layer's first norm. groups: rows
        that go through adapters. hidden: the residual stream, if the result may be added to it at once. The result is
        to be added to that, if it was not: [tokens, hidden size], on every shard the sum over all. Raises LinkBroken
        when another shard is gone."""
        ...


class MlpBlock(Protocol):
    """Feed-forward part of one layer."""

    @property
    def exchanges(self) -> bool:
        """Whether rows go to experts of other ranks."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether it queues the same operations for any pass of as many tokens, waits for nothing and exchanges nothing
        but sums: CUDA graphs can be captured of them."""
        ...

    def steps(
        self,
        normed: Rows,
        half: int = 0,
        groups: Groups = (),
        padding: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Steps[Tensor | Stream]:
        """normed: [tokens, hidden size], after the layer's second norm. half: of the forward pass, where it is cut.
        groups: rows that go through adapters. padding: bool [tokens, 1], which rows go to no expert; None: all go to
        some. hidden: see AttentionBlock.post().

        Returns what is to be added to the residual stream, if it was not: [tokens, hidden size], on every shard the sum
        over all. Raises LinkBroken when another rank is gone."""
        ...
