"""Attention on GPUs in float32, by torch's scaled_dot_product_attention; in 16-bit dtypes: varlen.py."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots


class SdpaPass(AttentionPass):
    """An AttentionPass by torch's scaled_dot_product_attention with an explicit mask, row by row; used for float32 on
    GPUs."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows. pool: on any device, of any dtype."""
        self._pool = pool
        self._spans = spans
        self._writer = SlotWriter(pool, spans)

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
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
