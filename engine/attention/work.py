"""Attention over keys and values that are in memory already, in pages, by kernels that are planned once for all layers:
what SlotPass and RingPass compute with."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.pool import KVPool


class PagedRows(NamedTuple):
    """Keys and values as the kernels find them: [pages, layers, kv_heads, page_size, width] each."""

    keys: Tensor
    values: Tensor | None
    """None where a value is the first elements of its key, which all heads share: a latent."""
    value_width: int

    @classmethod
    def of_pool(cls, pool: KVPool) -> "PagedRows":
        """The keys and values of a pool."""
        keys, values = pool.tensor.unbind(2)
        return cls(keys, values, values.shape[-1])

    @classmethod
    def of_latents(cls, pool: KVPool, value_width: int) -> "PagedRows":
        """The latents of a pool, whose first elements are values."""
        return cls(pool.tensor[:, :, 0], None, value_width)


class Ranges(NamedTuple):
    """The positions [begin, end) that each row of a batch attends to: int32 [rows] each, on the host. Neither decreases
    from a row of a request to the next."""

    begins: NDArray[np.int32]
    ends: NDArray[np.int32]


class RowWork(Protocol):
    """Attention of one pass's rows. Base class of the implementations."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """query [tokens, heads, width], whose heads are dense → [tokens, heads, value_width]. sinks: one more score of
        each head [heads], which has no value."""
        ...


PlanWork = Callable[[Sequence[AttentionSpan]], RowWork]
"""Plans a pass over rows of one pool, in batch order."""


class MakeWork(Protocol):
    """Plans a pass."""

    def __call__(
        self,
        spans: Sequence[AttentionSpan],
        rows: PagedRows,
        scale: float,
        *,
        softcap: float = 0.0,
        ranges: Ranges | None = None,
    ) -> RowWork:
        """spans: in batch order. scale: of the scores. softcap: c of scores that become c * tanh(score / c), 0 for
        none. ranges: what each row attends to; None: causally, all up to itself."""
        ...
