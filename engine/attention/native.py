"""Attention on the CPU in float32 or bfloat16 by one native kernel call per layer.

Flash attention (arXiv 2205.14135) with queries side by side: the query heads that share a KV head, token by token, each
in a lane of its own (engine/native/attention_float32.h, attention_bfloat16.h). Keys and values are read in tiles
straight from the pages, where those of the pass itself are written first; each tile in the cache is used by all query
rows of a work item. All spans of a batch share one parallel region, the longest first; few rows over many positions
are split among threads by segments of these.

Reproducible: a row's result has the same bits however its prompt is cut into chunks, whatever is in the batch beside
it, and whichever positions came from the prefix cache.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter
from headrace.engine.attention.work import PagedRows, Ranges, RowWork
from headrace.engine.kv.pool import KVPool
from headrace.engine.native.kernel_calls import (
    ALL_SEGMENTS,
    POOL_DTYPES,
    ItemRecord,
    Kernels,
    PassRecord,
    RowsRecord,
    ScoringRecord,
    SpanRecord,
)

LOG2_E = math.log2(math.e)  # the kernels' powers are of 2

# Query rows of a work item: more reuse each tile more often, fewer balance the threads better.
ITEM_ROWS = (768, 384, 192, 96)
ITEM_BYTES = 768 * 3 * 256 * 4  # of a thread's working memory, so that it stays in the L2 cache
ITEMS_PER_THREAD = 6
PARTIAL_ROWS = 16  # of an item that is split: as many as a panel of the narrowest vectors

# Positions after which what a row sums starts anew, to be merged in order: a multiple of the tiles of all kernels. It
# is a part of the arithmetic: another one gives other bits.
SEGMENT = 2048


class Item(NamedTuple):
    """Fields of ItemRecord; tokens is its count."""

    span: int
    head: int
    first: int
    tokens: int
    segment: int = ALL_SEGMENTS
    partial: int = 0


class NativeWriter(SlotWriter):
    """A SlotWriter by native kernels, for CPU pools of any dtype."""

    def __init__(self, pool: KVPool, kernels: Kernels, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of the spans' positions."""
        super().__init__(pool, spans)
        self._kernels = kernels

    def write(self, layer: int, keys_values: Tensor) -> None:
        """See SlotWriter."""
        if self._pool.tensor.dtype == torch.float16:
            super().write(layer, keys_values)
            return
        of_layer = self._first + layer * self._pool.blocks_per_layer * self._pool.page_size
        self._kernels.write_slots(keys_values, of_layer, self._pool.slots, self._pool.page_size)


class NativePass(AttentionPass):
    """An AttentionPass by native kernels, for CPU pools of any dtype. Work items are planned once, for all layers.

    Attention is computed in float32, or in bfloat16 where queries and pool are, if there is a kernel for that.
    """

    def __init__(self, pool: KVPool, kernels: Kernels, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the records of all rows. pool: on the CPU, of any dtype."""
        self._writer = NativeWriter(pool, kernels, spans)
        rows = PagedRows.of_pool(pool)
        self._work = NativeWork(kernels, spans, rows, 1 / math.sqrt(rows.keys.shape[-1]))

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._writer.write(layer, keys_values)
        return self._work.attend(layer, query)

    def terms(self, heads: int, *, items: bool) -> tuple[PassRecord, ScoringRecord]:
        """What the native kernels have to know of the pass, with its work items or without. heads: of the queries.
        They hold addresses of memory that lives as long as this."""
        return self._work.terms(heads, items=items)


class NativeWork(RowWork):
    """Kernel calls over keys and values that are in memory already, by work items that are planned once."""

    def __init__(
        self,
        kernels: Kernels,
        spans: Sequence[AttentionSpan],
        rows: PagedRows,
        scale: float,
        *,
        softcap: float = 0.0,
        ranges: Ranges | None = None,
    ) -> None:
        """Prepare the records of all rows. scale: of the scores. softcap: c of scores that become c * tanh(score / c),
        0 for none. ranges: what each row attends to; None: causally, all up to itself."""
        self._kernels = kernels
        self._spans = spans
        self._rows = rows
        self._ranges = ranges
        self._scoring = ScoringRecord(LOG2_E * scale, LOG2_E * softcap, None)
        self._records = (SpanRecord * len(spans))()
        row = 0
        for record, span in zip(self._records, spans, strict=True):
            record.start, record.count, record.row, record.pages = span.start, span.count, row, span.pages.ctypes.data
            row += span.count
        self._pass: PassRecord | None = None  # made by the first attend(), which knows the number of query heads

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See RowWork."""
        if self._pass is None:
            self._pass = self._plan(query.shape[1])
        of_layer = None if sinks is None else (sinks.float() * LOG2_E).contiguous()
        self._scoring.sinks = None if of_layer is None else of_layer.data_ptr()
        if self._kernels.attends(self._pass, query, self._scoring):
            return self._kernels.attend(self._pass, layer, query, self._scoring)
        return self._kernels.attend(self._pass, layer, query.float(), self._scoring).to(query.dtype)

    def terms(self, heads: int, *, items: bool) -> tuple[PassRecord, ScoringRecord]:
        """See NativePass."""
        return self._plan(heads) if items else self._record(heads), self._scoring

    def _record(self, heads: int) -> PassRecord:
        keys, values, value_width = self._rows
        group = heads // keys.shape[2] if values is not None else _divisor(heads, PARTIAL_ROWS)
        return PassRecord(
            keys=_record(keys) if values is not None else _record(keys, shared=True),
            values=RowsRecord(width=value_width) if values is None else _record(values),
            dtype=POOL_DTYPES[keys.dtype],
            page_size=keys.shape[3],
            kv_heads=heads // group,
            group=group,
            begins=None if self._ranges is None else self._ranges.begins.ctypes.data,
            ends=None if self._ranges is None else self._ranges.ends.ctypes.data,
            spans=ctypes.addressof(self._records),
            segment=SEGMENT,
        )

    def _plan(self, heads: int) -> PassRecord:
        """The work items of a layer, the most expensive first. heads: of the queries."""
        record = self._record(heads)
        group, self._kv_heads = record.group, record.kv_heads
        tokens = max(1, self._item_rows(group) // group)
        items, merges = self._split(list(self._items(tokens)), group)
        items.sort(key=self._cost, reverse=True)
        self._item_records = (ItemRecord * len(items))(*(ItemRecord(*item) for item in items))
        self._merge_records = (ItemRecord * len(merges))(*(ItemRecord(*merge) for merge in merges))
        record.items, record.item_count = ctypes.addressof(self._item_records), len(items)
        record.most_tokens = min(tokens, max(span.count for span in self._spans))
        record.merges, record.merge_count = ctypes.addressof(self._merge_records), len(merges)
        record.partial_count = self._partials
        return record

    def _item_rows(self, group: int) -> int:
        """The most rows of ITEM_ROWS that leave enough items for every thread."""
        rows = sum(span.count for span in self._spans) * group * self._kv_heads
        items = ITEMS_PER_THREAD * torch.get_num_threads()
        most = ITEM_BYTES // (4 * (self._rows.keys.shape[-1] + 2 * self._rows.value_width))
        return next((size for size in ITEM_ROWS if rows >= items * size and size <= most), ITEM_ROWS[-1])

    def _items(self, tokens: int) -> Iterator[Item]:
        """Items of so many tokens at most."""
        for index, span in enumerate(self._spans):
            for first in range(0, span.count, tokens):
                for head in range(self._kv_heads):
                    yield Item(index, head, first, min(tokens, span.count - first))

    def _split(self, items: list[Item], group: int) -> tuple[list[Item], list[Item]]:
        """Items over single segments in place of those of few rows and many positions, where there are too few items
        for the threads; and how the segments of each are merged."""
        found: list[Item] = []
        merges: list[Item] = []
        few = torch.get_num_threads() > 1 and len(items) < ITEMS_PER_THREAD * torch.get_num_threads()
        self._partials = 0
        for item in items:
            begin, end = self._seen(item)
            segments = range(begin // SEGMENT, ceil_div(end, SEGMENT))
            if few and len(segments) > 1 and item.tokens * group <= PARTIAL_ROWS:
                merges.append(item._replace(segment=segments.stop, partial=self._partials))
                found += [item._replace(segment=each, partial=self._partials + at) for at, each in enumerate(segments)]
                self._partials += len(segments)
            else:
                found.append(item)
        return found, merges

    def _seen(self, item: Item) -> tuple[int, int]:
        """The positions [begin, end) that rows of an item attend to."""
        last = item.first + item.tokens - 1
        if self._ranges is None:
            return 0, self._spans[item.span].start + last + 1
        row = self._records[item.span].row
        return int(self._ranges.begins[row + item.first]), int(self._ranges.ends[row + last])

    def _cost(self, item: Item) -> int:
        """Scores to compute, per head of the group."""
        begin, end = self._seen(item)
        if item.segment != ALL_SEGMENTS:
            begin, end = max(begin, item.segment * SEGMENT), min(end, (item.segment + 1) * SEGMENT)
        return (end - begin) * item.tokens


def _record(rows: Tensor, *, shared: bool = False) -> RowsRecord:
    """Where rows [pages, layers, kv_heads, page_size, width] are. shared: by all heads."""
    pages, layers, heads, slots, _ = rows.stride()
    if slots != rows.shape[4] or rows.stride(4) != 1:
        raise ValueError("rows of a page do not lie one after the other")
    return RowsRecord(rows.data_ptr(), pages, layers, 0 if shared else heads, rows.shape[4])


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to so much."""
    return next(size for size in range(most, 0, -1) if number % size == 0)
