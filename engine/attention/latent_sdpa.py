"""Attention over latents in absorbed form by scaled_dot_product_attention, for GPUs and CPUs without native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.attention.base import AttentionSpan
from headrace.engine.attention.expanded import masked_tiles
from headrace.engine.attention.slots import SlotWriter, slot_index
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.mla_spec import MlaSpec


class LatentSdpaAttention:
    """Attention to latents, which are keys and values of all heads. See LatentRows.absorbed for shapes."""

    def __init__(self, mla: MlaSpec, pool: KVPool) -> None:
        """pool: on any device, of any dtype."""
        self._mla = mla
        self._pool = pool

    def begin(self, spans: Sequence[AttentionSpan]) -> "LatentSdpaPass":
        """See Attention."""
        return LatentSdpaPass(self._mla, self._pool, spans)


class LatentSdpaPass:
    """An AttentionPass, row by row."""

    def __init__(self, mla: MlaSpec, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows."""
        self._mla = mla
        self._pool = pool
        self._spans = spans
        self._writer = SlotWriter(pool, spans)
        self._slots = [slot_index(pool, [span], prefixes=True) for span in spans]

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass and LatentRows.absorbed."""
        self._writer.write(layer, keys_values)
        parts = []
        first = 0
        for span, slots in zip(self._spans, self._slots, strict=True):
            rows = self._pool.slots.index_select(0, slots + layer * self._pool.page_size * self._pool.blocks_per_layer)
            parts.append(self._row(query[first : first + span.count], rows.to(query.dtype)))
            first += span.count
        return torch.cat(parts)

    def _row(self, query: Tensor, rows: Tensor) -> Tensor:
        """query: [tokens, heads, slot_dim]; rows: latents of all positions [positions, slot_dim]."""
        values = rows[:, : self._mla.kv_rank]
        if len(query) == 1:  # heads side by side are rows of a product, so each latent is read once
            scores = (query[0] @ rows.T).float() * self._mla.scale
            return (scores.softmax(-1).to(query.dtype) @ values)[None]
        heads = query.shape[1]
        keys, shared = (part[:, None].expand(-1, heads, -1) for part in (rows, values))
        return masked_tiles(query, keys, shared, self._mla.scale)
