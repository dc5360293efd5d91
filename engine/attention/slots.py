"""Attention over any tensors of a pool: layers whose keys and values lie in tensors of their own, of other widths, that
write and attend apart, or attend to what another layer has written.

By kernels where there are any (work.py), else by plain torch, row by row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.work import MakeWork, PagedRows, Ranges, RowWork
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool


class LayerSlot(NamedTuple):
    """Where in a pool the keys and values of a layer are."""

    keys: str
    """Name of a tensor of the pool."""
    values: str
    """The same where it has two planes."""
    layer: int
    """Counted from the tensor's first."""


class Scores(NamedTuple):
    """How the scores of a layer become weights."""

    scale: float
    softcap: float = 0.0
    """c of scores that become c * tanh(score / c); 0: they stay as they are."""
    sinks: Tensor | None = None
    """One more score of each head [heads], which has no value."""


class SlotPass:
    """Attention of one forward pass over rows; keys and values are written before they are attended to."""

    def __init__(self, pool: KVPool, make_work: MakeWork | None, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows. make_work: None computes by torch."""
        self.spans = spans
        self._pool = pool
        self._make_work = make_work
        self._own = self._where([(span, span.start) for span in spans])
        self._all: tuple[Tensor, Tensor] | None = None  # made by the first layer that gathers
        self._work: dict[tuple[object, ...], RowWork] = {}
        self._kept: list[Ranges] = []  # alive, so that their ids stay theirs

    def write(self, slot: LayerSlot, keys: Tensor, values: Tensor) -> None:
        """Write keys and values of this pass's tokens [tokens, kv_heads, width]."""
        pages, slots = self._own
        for where, rows in zip(self._views(slot), (keys, values), strict=True):
            where[:, slot.layer][pages, :, slots] = rows.to(where.dtype)

    def gather(self, slot: LayerSlot, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions of all rows, one row after the other: [positions, kv_heads, width] each."""
        if self._all is None:
            self._all = self._where([(span, 0) for span in self.spans])
        pages, slots = self._all
        keys, values = (where[:, slot.layer][pages, :, slots].to(dtype) for where in self._views(slot))
        return keys, values

    def attend(self, slot: LayerSlot, query: Tensor, scores: Scores, ranges: Ranges | None) -> Tensor:
        """query [tokens, heads, width] → [tokens, heads, width of values]. ranges: what each token attends to; None:
        causally, all up to itself."""
        keys, values = self._views(slot)
        if self._make_work is None:
            return torch.cat([self._plain(slot, query, scores, ranges, number) for number in range(len(self.spans))])
        key = slot.keys, slot.values, query.shape[1], scores.scale, scores.softcap, id(ranges)
        if key not in self._work:
            rows = PagedRows(keys, values, values.shape[-1])
            self._work[key] = self._make_work(self.spans, rows, scores.scale, softcap=scores.softcap, ranges=ranges)
            if ranges is not None:
                self._kept.append(ranges)
        rows_of = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
        return self._work[key].attend(slot.layer, rows_of, scores.sinks)

    def _plain(self, slot: LayerSlot, query: Tensor, scores: Scores, ranges: Ranges | None, number: int) -> Tensor:
        """Attention of one row by torch, some memory for its scores."""
        span = self.spans[number]
        first = sum(each.count for each in self.spans[:number])
        rows = slice(first, first + span.count)
        ends = np.arange(span.start, span.start + span.count, dtype=np.int32) + 1
        of = Ranges(np.zeros_like(ends), ends) if ranges is None else ranges
        begins, ends = of if ranges is None else Ranges(of.begins[rows], of.ends[rows])
        positions = np.arange(begins[0], ends[-1])
        pages, slots = self._indices(span, positions)
        keys, values = (where[:, slot.layer][pages, :, slots] for where in self._views(slot))
        seen = place((positions >= begins[:, None]) & (positions < ends[:, None]), query.device)
        return plain_attention(query[rows], keys.to(query.dtype), values.to(query.dtype), seen, scores)

    def _views(self, slot: LayerSlot) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, layers, kv_heads, page_size, width]."""
        keys, values = self._pool.tensors[slot.keys], self._pool.tensors[slot.values]
        return keys[:, :, 0], values[:, :, values.shape[2] - 1]

    def _where(self, parts: Sequence[tuple[AttentionSpan, int]]) -> tuple[Tensor, Tensor]:
        """Pages and slots of the positions of spans from some position on."""
        found = [self._indices(span, np.arange(first, span.start + span.count)) for span, first in parts]
        pages, slots = (torch.cat(each) for each in zip(*found, strict=True))
        return pages, slots

    def _indices(self, span: AttentionSpan, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        pages, slots = np.divmod(positions, self._pool.page_size)
        device = self._pool.tensor.device
        return place(span.pages[pages], device), place(slots, device)


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Attention of one request by torch, with all of its scores in memory, in float32.

    query: [tokens, heads, width]. keys, values: [positions, kv_heads, width of them]. seen: bool [tokens, positions].
    Returns [tokens, heads, width of values].
    """
    tokens, heads, width = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    grouped = query.view(tokens, kv_heads, group, width).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, width)
    products = (grouped @ keys.permute(1, 2, 0)).float().view(kv_heads, group, tokens, -1) * scores.scale
    if scores.softcap:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, tokens, 1)
        products = torch.cat((products, sinks), dim=-1)
    weights = products.softmax(-1)[..., : len(keys)].to(values.dtype).view(kv_heads, group * tokens, -1)
    mixed = weights @ values.transpose(0, 1)
    return mixed.view(heads, tokens, -1).transpose(0, 1)
