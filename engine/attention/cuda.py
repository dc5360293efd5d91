"""Attention on CUDA: one variable-length FlashAttention call (arXiv 2307.08691) for all rows; 16-bit dtypes only.

Keys and values of a batch are gathered from the pool first, once per layer: the kernel's own paging requires pages of
256 tokens. Queries, keys and values may be strided as long as each head is dense, so nothing else is copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from headrace.engine.attention.base import AttentionSpan
from headrace.engine.attention.slots import SlotWriter, slot_index
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool

CAUSAL = (-1, 0)  # window: all keys to the left; the last query is aligned with the last key


class VarlenAttention:
    """Attention by torch.nn.attention.varlen, for float16 and bfloat16 on CUDA."""

    def __init__(self, pool: KVPool) -> None:
        """pool: on a GPU, in a 16-bit dtype."""
        self._pool = pool

    def begin(self, spans: Sequence[AttentionSpan]) -> "VarlenPass":
        """See Attention."""
        return VarlenPass(self._pool, spans)


class VarlenPass:
    """An AttentionPass: gathers all keys and values of the batch, then one kernel call per layer."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows."""
        self._pool = pool
        self._writer = SlotWriter(pool, spans)
        self._longest_query = max(span.count for span in spans)
        self._longest_key = max(span.start + span.count for span in spans)
        device = pool.tensor.device
        self._query_ends = _ends([span.count for span in spans], device)
        self._key_ends = _ends([span.start + span.count for span in spans], device)
        self._slots = slot_index(pool, spans, prefixes=True)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._writer.write(layer, keys_values)
        geometry = self._pool.geometry
        stride = self._pool.blocks_per_layer * geometry.page_size
        rows = self._pool.slots.index_select(0, self._slots + layer * stride)
        keys, values = rows.view(-1, 2 * geometry.kv_heads, geometry.head_dim).chunk(2, dim=1)
        attended = varlen_attn(
            query,
            keys,
            values,
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_key,
            window_size=CAUSAL,
            enable_gqa=query.shape[1] != geometry.kv_heads,
        )
        assert isinstance(attended, Tensor)
        return attended


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    """Cumulative lengths (cu_seqlens): int32 [rows + 1], from 0, on the device."""
    return place(np.cumsum([0, *lengths], dtype=np.int32), device)
