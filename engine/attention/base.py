"""Interface of attention implementations, as the decoder calls them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One row of a batch: positions [start, start + count) of a request."""

    start: int
    count: int
    pages: NDArray[np.int64]
    """Page ids covering [0, start + count), on the host."""


class AttentionPass(Protocol):
    """Attention of one forward pass over a fixed set of spans; indices shared by all layers are prepared once."""

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """Write this pass's keys and values to the pool, then compute causal attention over each request's positions.

        layer: counted from the stage's first. query: [tokens, heads, head_dim]. keys_values: [tokens, 2 * kv_heads,
        head_dim], keys before values. Rotary embedding is applied already; tokens are in the order of the spans.
        Returns [tokens, heads, head_dim].
        """
        ...


class Attention(Protocol):
    """Attention over one KV pool. Slots that no span covers never influence a result, even if they hold NaN."""

    def begin(self, spans: Sequence[AttentionSpan]) -> AttentionPass:
        """Prepare a forward pass over these rows, in batch order."""
        ...
