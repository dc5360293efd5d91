"""Interfaces of the two blocks of a decoder layer, as the decoder calls them."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headrace.engine.attention.base import AttentionPass


class Rotary(NamedTuple):
    """Rotary embedding of the rows of a forward pass: float32 [tokens, 1, width] each, from rotary_tables."""

    cos: Tensor
    sin: Tensor


class AttentionBlock(Protocol):
    """Projections, rotary embedding and attention of one layer."""

    def forward(self, layer: int, normed: Tensor, rotary: Rotary, attention: AttentionPass) -> Tensor:
        """layer: counted from the stage's first. normed: [tokens, hidden size], after the layer's first norm. Returns
        what is added to the residual stream, [tokens, hidden size]: on every shard the sum over all. Raises LinkBroken
        when another shard is gone."""
        ...


class MlpBlock(Protocol):
    """Feed-forward part of one layer."""

    def forward(self, normed: Tensor) -> Tensor:
        """normed: [tokens, hidden size], after the layer's second norm. Returns what is added to the residual stream,
        [tokens, hidden size]: on every shard the sum over all. Raises LinkBroken when another shard is gone."""
        ...
