"""Attention over latents in expanded form: keys and values of all positions are made of their latents."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.native import NativeWork
from headrace.engine.attention.paged import AttentionSpan, slot_index
from headrace.engine.attention.work import PagedRows
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.native.kernel_calls import Kernels

TILE_BYTES = 128 << 20  # of expanded keys and values at a time, which are of some heads and all positions of a row
QUERY_TILE = 256  # tokens, at most, whose scores a mask is made for


class Expand(Protocol):
    """Makes keys and values of latents."""

    def __call__(self, latents: Tensor, heads: range) -> Tensor:
        """latents [positions, kv_rank] → [positions, heads, nope_dim + value_dim] of these heads, keys before values,
        in the dtype of computation."""
        ...


class DenseAttention(Protocol):
    """Causal attention of one row to keys and values that are in memory."""

    def attend(self, query: Tensor, expanded: Tensor, rotated: Tensor, nope_dim: int) -> Tensor:
        """query: [tokens, heads, nope_dim + rope_dim], at the last positions. expanded: [positions, heads, nope_dim +
        value_dim]. rotated: the part of the keys that heads share, [positions, rope_dim]. Returns [tokens, heads,
        value_dim]."""
        ...


class ExpandedRows:
    """Attention of rows of one forward pass in expanded form, row by row, some heads at a time."""

    def __init__(self, mla: MlaSpec, pool: KVPool, spans: Sequence[AttentionSpan], dense: DenseAttention) -> None:
        """Prepare the indices of all rows."""
        self._mla = mla
        self._pool = pool
        self._spans = spans
        self._dense = dense
        self._slots = [slot_index(pool, [span], prefixes=True) for span in spans]

    def attend(self, layer: int, query: Tensor, expand: Expand) -> Tensor:
        """Attend to each request's positions, whose latents are in the pool.

        layer: counted from the stage's first. query: [tokens, heads, nope_dim + rope_dim], rotated. Returns [tokens,
        heads, value_dim].
        """
        attended = []
        first = 0
        for span, slots in zip(self._spans, self._slots, strict=True):
            rows = self._pool.slots_from(layer).index_select(0, slots).to(query.dtype)
            attended.append(self._row(query[first : first + span.count], rows, expand))
            first += span.count
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _row(self, query: Tensor, rows: Tensor, expand: Expand) -> Tensor:
        """Of one row. rows: latents of all its positions [positions, slot_dim]."""
        rank, heads = self._mla.kv_rank, query.shape[1]
        attended = []
        for tile in self._tiles(heads, rows):
            some = query[:, tile.start : tile.stop]
            expanded = expand(rows[:, :rank], tile)
            attended.append(self._dense.attend(some, expanded, rows[:, rank:], self._mla.nope_dim))
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)

    def _tiles(self, heads: int, rows: Tensor) -> list[range]:
        """Runs of heads whose keys and values fit into TILE_BYTES, or single heads."""
        of_head = len(rows) * (self._mla.query_dim + self._mla.value_dim) * rows.element_size()
        step = max(1, TILE_BYTES // of_head)
        return [range(head, min(head + step, heads)) for head in range(0, heads, step)]


class NativeDense:
    """DenseAttention by native kernels, on the CPU: a row's result has the same bits however its prompt is cut."""

    def __init__(self, kernels: Kernels, scale: float) -> None:
        """scale: of the scores."""
        self._kernels = kernels
        self._scale = scale

    def attend(self, query: Tensor, expanded: Tensor, rotated: Tensor, nope_dim: int) -> Tensor:
        """See DenseAttention."""
        positions, heads, both = expanded.shape
        keys = expanded.new_empty(1, 1, heads, positions, query.shape[2])  # of one page and layer
        keys[..., :nope_dim] = expanded[..., :nope_dim].transpose(0, 1)
        keys[..., nope_dim:] = rotated
        values = expanded[..., nope_dim:].transpose(0, 1).contiguous()[None, None]
        span = AttentionSpan(positions - len(query), len(query), np.zeros(1, np.int64))
        rows = PagedRows(keys, values, both - nope_dim)
        return NativeWork(self._kernels, [span], rows, self._scale).attend(0, query.contiguous())


class SdpaDense:
    """DenseAttention by scaled_dot_product_attention, on any device, some tokens at a time."""

    def __init__(self, scale: float) -> None:
        """scale: of the scores."""
        self._scale = scale

    def attend(self, query: Tensor, expanded: Tensor, rotated: Tensor, nope_dim: int) -> Tensor:
        """See DenseAttention."""
        keys, values = split_heads(expanded, rotated, nope_dim)
        return masked_tiles(query, keys, values, self._scale)


def split_heads(expanded: Tensor, rotated: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [positions, heads, nope_dim + rope_dim] and values [positions, heads, value_dim]; see DenseAttention."""
    shared = rotated[:, None].expand(-1, expanded.shape[1], -1)
    return torch.cat((expanded[..., :nope_dim], shared), dim=-1), expanded[..., nope_dim:]


def masked_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention by scaled_dot_product_attention, as many tokens at a time as have scores of TILE_BYTES, where
    torch has no better kernel than one that holds all of them.

    query: [tokens, heads, width], at the last positions. keys, values: [positions, heads, width or another], heads may
    be expanded. Returns [tokens, heads, width of values].
    """
    start = len(keys) - len(query)
    step = max(1, min(QUERY_TILE, TILE_BYTES // (4 * query.shape[1] * len(keys))))
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    parts = []
    for first in range(0, len(query), step):
        some = query[first : first + step]
        seen = start + first + len(some)
        mask = None
        if len(some) > 1:
            positions = torch.arange(seen, device=query.device)
            mask = positions[None, :] <= positions[start + first :, None]
        attended = F.scaled_dot_product_attention(
            some.transpose(0, 1)[None], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)
