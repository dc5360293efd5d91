"""Attention on the CPU in float32 by one kernel per layer: engine/native/kernels.c, headrace_attend.

Flash attention (arXiv 2205.14135) with queries side by side: a panel holds 16 rows, the query heads of a KV head token
by token, and every score, maximum, sum and output is kept for all of them in two vectors. Keys and values are read in
tiles straight from the pages, in 16 bits too, and are never transposed; a tile in the cache is met by ITEM_ROWS rows.
Rows end at their own position, so next to nothing is computed in vain on the diagonal. All spans of a batch are one
parallel region, long ones first.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from headrace.engine.attention.base import AttentionSpan
from headrace.engine.attention.slots import SlotWriter
from headrace.engine.kv.pool import KVPool
from headrace.engine.native import POOL_DTYPES, ItemRecord, Kernels, PassRecord, SpanRecord

ITEM_ROWS = 192  # more reuse of a tile, against more even shares of the threads


class NativeAttention:
    """For pools on the CPU, in any dtype; queries, keys and values of a pass are float32."""

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        self._pool = pool
        self._kernels = kernels

    def begin(self, spans: Sequence[AttentionSpan]) -> "NativePass":
        return NativePass(self._pool, self._kernels, spans)


class NativePass:
    def __init__(self, pool: KVPool, kernels: Kernels, spans: Sequence[AttentionSpan]) -> None:
        self._pool = pool
        self._kernels = kernels
        self._spans = spans
        self._writer = SlotWriter(pool, spans)
        self._scale = math.log2(math.e) / math.sqrt(pool.geometry.head_dim)
        self._records = (SpanRecord * len(spans))()
        row = 0
        for record, span in zip(self._records, spans, strict=True):
            record.start, record.count, record.row, record.pages = span.start, span.count, row, span.pages.ctypes.data
            row += span.count
        self._pass: PassRecord | None = None  # made when the number of query heads is seen

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        self._writer.write(layer, keys_values)
        if self._pass is None:
            self._pass = self._planned(query.shape[1] // self._pool.geometry.kv_heads)
        return self._kernels.attend(self._pass, layer, query, keys_values, self._scale)

    def _planned(self, group: int) -> PassRecord:
        """group: query heads per KV head."""
        geometry = self._pool.geometry
        tokens = max(1, ITEM_ROWS // group)
        items = sorted(self._items(tokens), key=self._cost, reverse=True)
        self._items_array = (ItemRecord * len(items))(*(ItemRecord(*item) for item in items))
        return PassRecord(
            pool=self._pool.tensor.data_ptr(),
            dtype=POOL_DTYPES[self._pool.tensor.dtype],
            page_size=geometry.page_size,
            page_stride=self._pool.blocks_per_page * geometry.page_size * geometry.head_dim,
            kv_heads=geometry.kv_heads,
            group=group,
            width=geometry.head_dim,
            spans=ctypes.addressof(self._records),
            items=ctypes.addressof(self._items_array),
            item_count=len(items),
            most_tokens=min(tokens, max(span.count for span in self._spans)),
        )

    def _items(self, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        for index, span in enumerate(self._spans):
            for first in range(0, span.count, tokens):
                for head in range(self._pool.geometry.kv_heads):
                    yield index, head, first, min(tokens, span.count - first)

    def _cost(self, item: tuple[int, int, int, int]) -> int:
        span, _, first, count = item
        return (self._spans[span].start + first + count) * count
