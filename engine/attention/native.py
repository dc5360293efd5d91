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

from headrace.core.types.geometry import ceil_div
from headrace.engine.attention.base import AttentionSpan
from headrace.engine.attention.slots import SlotWriter, first_slots
from headrace.engine.kv.pool import KVPool
from headrace.engine.native import ALL_SEGMENTS, POOL_DTYPES, ItemRecord, Kernels, PassRecord, SpanRecord

# Query rows of a work item: more reuse each tile more often, fewer balance the threads better.
ITEM_ROWS = (768, 384, 192, 96)
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


class NativeAttention:
    """Attention by native kernels, for CPU pools of any dtype.

    Attention is computed in float32, or in bfloat16 where queries and pool are, if there is a kernel for that.
    """

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        """pool: on the CPU, of any dtype."""
        self._pool = pool
        self._kernels = kernels

    def begin(self, spans: Sequence[AttentionSpan]) -> "NativePass":
        """See Attention."""
        return NativePass(self._pool, self._kernels, spans)


class NativePass:
    """An AttentionPass whose work items are planned once, for all layers."""

    def __init__(self, pool: KVPool, kernels: Kernels, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the records of all rows."""
        self._pool = pool
        self._kernels = kernels
        self._spans = spans
        self._slots = first_slots(pool, spans, prefixes=False)
        self._scale = math.log2(math.e) / math.sqrt(pool.geometry.head_dim)
        self._records = (SpanRecord * len(spans))()
        row = 0
        for record, span in zip(self._records, spans, strict=True):
            record.start, record.count, record.row, record.pages = span.start, span.count, row, span.pages.ctypes.data
            row += span.count
        self._pass: PassRecord | None = None  # made by the first attend(), which knows the number of query heads

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._write(layer, keys_values)
        if self._pass is None:
            self._pass = self._plan(query.shape[1] // self._pool.geometry.kv_heads)
        if self._kernels.attends(self._pass, query):
            return self._kernels.attend(self._pass, layer, query, self._scale)
        return self._kernels.attend(self._pass, layer, query.float(), self._scale).to(query.dtype)

    def _write(self, layer: int, keys_values: Tensor) -> None:
        if self._pool.tensor.dtype == torch.float16:
            SlotWriter(self._pool, self._spans).write(layer, keys_values)
            return
        of_layer = self._slots + layer * self._pool.blocks_per_layer * self._pool.page_size
        self._kernels.write_slots(keys_values, of_layer, self._pool.slots, self._pool.page_size)

    def _plan(self, group: int) -> PassRecord:
        """The work items of a layer, the most expensive first. group: query heads per KV head."""
        geometry = self._pool.geometry
        tokens = max(1, self._item_rows(group) // group)
        items, merges = self._split(list(self._items(tokens)), group)
        items.sort(key=self._cost, reverse=True)
        self._item_records = (ItemRecord * len(items))(*(ItemRecord(*item) for item in items))
        self._merge_records = (ItemRecord * len(merges))(*(ItemRecord(*merge) for merge in merges))
        return PassRecord(
            pool=self._pool.tensor.data_ptr(),
            dtype=POOL_DTYPES[self._pool.tensor.dtype],
            page_size=geometry.page_size,
            page_stride=self._pool.blocks_per_page * geometry.page_size * geometry.head_dim,
            kv_heads=geometry.kv_heads,
            group=group,
            width=geometry.head_dim,
            spans=ctypes.addressof(self._records),
            items=ctypes.addressof(self._item_records),
            item_count=len(items),
            most_tokens=min(tokens, max(span.count for span in self._spans)),
            segment=SEGMENT,
            merges=ctypes.addressof(self._merge_records),
            merge_count=len(merges),
            partial_count=sum(merge.segment for merge in merges),
        )

    def _item_rows(self, group: int) -> int:
        """The most rows of ITEM_ROWS that leave enough items for every thread."""
        rows = sum(span.count for span in self._spans) * group * self._pool.geometry.kv_heads
        items = ITEMS_PER_THREAD * torch.get_num_threads()
        return next((size for size in ITEM_ROWS if rows >= items * size), ITEM_ROWS[-1])

    def _items(self, tokens: int) -> Iterator[Item]:
        """Items of so many tokens at most."""
        for index, span in enumerate(self._spans):
            for first in range(0, span.count, tokens):
                for head in range(self._pool.geometry.kv_heads):
                    yield Item(index, head, first, min(tokens, span.count - first))

    def _split(self, items: list[Item], group: int) -> tuple[list[Item], list[Item]]:
        """Items over single segments in place of those of few rows and many positions, where there are too few items
        for the threads; and how the segments of each are merged."""
        found: list[Item] = []
        merges: list[Item] = []
        few = torch.get_num_threads() > 1 and len(items) < ITEMS_PER_THREAD * torch.get_num_threads()
        partials = 0
        for item in items:
            segments = ceil_div(self._spans[item.span].start + item.first + item.tokens, SEGMENT)
            if few and segments > 1 and item.tokens * group <= PARTIAL_ROWS:
                merges.append(item._replace(segment=segments, partial=partials))
                found += [item._replace(segment=each, partial=partials + each) for each in range(segments)]
                partials += segments
            else:
                found.append(item)
        return found, merges

    def _cost(self, item: Item) -> int:
        """Scores to compute, per head of the group."""
        end = self._spans[item.span].start + item.first + item.tokens
        return (end if item.segment == ALL_SEGMENTS else min(SEGMENT, end - item.segment * SEGMENT)) * item.tokens
