"""Where keys and values lie in the pool, and how a pass puts its own there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import Span
from engine.pool import KVPool


class SlotWriter:
    """Scatters the keys and values of a batch into the pages of its spans, one operation per layer."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        self._slots = pool.slots
        self._layer_stride = pool.blocks_per_layer * pool.geometry.page_size
        self._index = torch.cat([slot_index(pool, span, span.start) for span in spans])

    def write(self, layer: int, keys_values: Tensor) -> None:
        """keys_values: [tokens, 2 * kv_heads, head_dim], in the pool's dtype or a wider one."""
        rows = keys_values.reshape(-1, keys_values.shape[-1]).to(self._slots.dtype)
        self._slots.index_copy_(0, self._index + layer * self._layer_stride, rows)


def slot_index(pool: KVPool, span: Span, first: int) -> Tensor:
    """Rows of pool.slots with layer 0 of positions [first, span's end): int64 [positions * 2 * kv_heads].

    Position by position, K heads before V heads; other layers follow at blocks_per_layer * page_size each.
    """
    size = pool.geometry.page_size
    positions = torch.arange(first, span.start + span.count, device=span.pages.device)
    base = span.pages[positions // size] * (pool.blocks_per_page * size) + positions % size
    heads = torch.arange(pool.blocks_per_layer, device=span.pages.device) * size
    return (base[:, None] + heads).reshape(-1)
