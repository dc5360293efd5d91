"""Attention on GPUs: FlashAttention (arXiv 2307.08691) in 16-bit dtypes, scaled_dot_product_attention in float32.

The former is one variable-length call for all rows. Keys and values of a batch are gathered from the pool first, once
per layer: the kernel's own paging requires pages of 256 tokens. Queries, keys and values may be strided as long as each
head is dense, so nothing else is copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.paged import AttentionSpan, SlotWriter, slot_index
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool


class SdpaPass:
    """An AttentionPass by torch's scaled_dot_product_attention with an explicit mask, row by row; used for float32 on
    GPUs."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows. pool: on any device, of any dtype."""
        self._pool = pool
        self._spans = spans
        self._writer = SlotWriter(pool, spans)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._writer.write(layer, keys_values)
        parts = []
        offset = 0
        for span in self._spans:
            keys, values = self._row(layer, span)
            positions = torch.arange(span.start + span.count, device=query.device)
            visible = positions[None, :] <= positions[span.start :, None]
            queries = query[offset : offset + span.count].transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
            parts.append(attended[0].transpose(0, 1))
            offset += span.count
        return torch.cat(parts)

    def _row(self, layer: int, span: AttentionSpan) -> tuple[Tensor, Tensor]:
        """Keys and values of a row: [1, kv_heads, positions, head_dim] each."""
        ids = place(span.pages, self._pool.tensor.device)
        pages = self._pool.tensor[ids, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = pages[:, None, :, : span.start + span.count].unbind(0)
        return keys, values


CAUSAL = (-1, 0)  # window: all keys to the left; the last query is aligned with the last key


class VarlenPass:
    """An AttentionPass by torch.nn.attention.varlen, for float16 and bfloat16 on CUDA: gathers all keys and values of
    the batch, then one kernel call per layer."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows. pool: on a GPU, in a 16-bit dtype."""
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
        from torch.nn.attention.varlen import varlen_attn  # not in every torch

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
