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
    """Makes keys and values of what a pool of latents holds."""

    def __call__(self, rows: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """rows [positions, slot_dim] → keys [positions, heads, query_dim] and values [positions, heads, value_dim] of
        these heads, in the dtype of computation. Either may be wider, filled up with zeros."""
        ...


class DenseAttention(Protocol):
    """Causal attention of one row to keys and values that are in memory."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query: [tokens, heads, width], at the last positions. keys: [positions, heads, width]. values: [positions,
        heads, width or another]. Returns [tokens, heads, width of values]."""
        ...


class ExpandedRows:
    """Attention of rows of one forward pass in expanded form, row by row, some heads at a time."""

    def __init__(self, mla: MlaSpec, pool: KVPool, spans: Sequence[AttentionSpan], dense: DenseAttention) -> None:
        """Of these rows."""
        self._mla = mla
        self._pool = pool
        self._spans = spans
        self._dense = dense
        self._slots: dict[int, Tensor] = {}  # by row; made by the first layer that looks there

    def attend(self, layer: int, query: Tensor, latents: Tensor, expand: Expand) -> Tensor:
        """Attend to each request's positions, whose latents are in the pool.

        layer: counted from the stage's first. query: [tokens, heads, nope_dim + rope_dim], rotated. latents: of the
        rows' tokens, if they are at hand, [tokens, 1 or 0, slot_dim]. Returns [tokens, heads, value_dim].
        """
        attended = []
        first = 0
        for number, span in enumerate(self._spans):
            tokens = slice(first, first + span.count)
            if span.start == 0 and latents.shape[1] and latents.dtype == self._pool.tensor.dtype == query.dtype:
                rows = latents[tokens, 0]
            else:
                rows = self._gathered(layer, number).to(query.dtype)
            attended.append(self._row(query[tokens], rows, expand))
            first += span.count
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _gathered(self, layer: int, number: int) -> Tensor:
        """Latents of all positions of a row, out of the pool: [positions, slot_dim]."""
        if number not in self._slots:
            self._slots[number] = slot_index(self._pool, [self._spans[number]], prefixes=True)
        return self._pool.slots_from(layer).index_select(0, self._slots[number])

    def _row(self, query: Tensor, rows: Tensor, expand: Expand) -> Tensor:
        """Of one row. rows: latents of all its positions [positions, slot_dim]."""
        attended = []
        for tile in self._tiles(query.shape[1], rows):
            keys, values = expand(rows, tile)
            some = query[:, tile.start : tile.stop]
            if keys.shape[2] > some.shape[2]:
                some = F.pad(some, (0, keys.shape[2] - some.shape[2]))
            attended.append(self._dense.attend(some, keys, values)[..., : self._mla.value_dim])
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

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See DenseAttention."""
        span = AttentionSpan(len(keys) - len(query), len(query), np.zeros(1, np.int64))
        page = [part.transpose(0, 1).contiguous()[None, None] for part in (keys, values)]  # one, of one layer
        rows = PagedRows(page[0], page[1], values.shape[2])
        return NativeWork(self._kernels, [span], rows, self._scale).attend(0, query.contiguous())


class SdpaDense:
    """DenseAttention by scaled_dot_product_attention, on any device, some tokens at a time."""

    def __init__(self, scale: float) -> None:
        """scale: of the scores."""
        self._scale = scale

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See DenseAttention."""
        return masked_tiles(query, keys, values, self._scale)


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
