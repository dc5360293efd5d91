"""What the decoder asks of an attention implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One row of a batch: positions [start, start + count) of a request.

    pages: int64 page ids, on the host; they cover [0, start + count).
    """

    start: int
    count: int
    pages: NDArray[np.int64]


class AttentionPass(Protocol):
    """One forward pass over a fixed set of spans; whatever all layers share is worked out beforehand."""

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """Write this pass's keys and values to the pool, then attend causally over every request's positions.

        layer: counted from the stage's first. query: [tokens, heads, head_dim], keys_values:
        [tokens, 2 * kv_heads, head_dim], keys before values, both rotated already; tokens in the order of the
        spans. Returns [tokens, heads, head_dim].
        """
        ...


class Attention(Protocol):
    """Attention over one KV pool. Slots that no span covers never influence a result, whatever they hold."""

    def begin(self, spans: Sequence[AttentionSpan]) -> AttentionPass: ...
