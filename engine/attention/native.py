"""Attention on the CPU in float32 by one native kernel call per layer: headrace_attend in engine/native/kernels.c.

Flash attention (arXiv 2205.14135) with queries side by side. A panel holds 16 query rows: the query heads that share a
KV head, token by token. Scores, maxima, sums and outputs of a panel are kept in two vectors each. Keys and values are
read in tiles straight from the pages, in 16 bits too, and are never transposed; each tile in the cache is used by
ITEM_ROWS query rows. Each row ends at its own position, so almost no masked score is computed. All spans of a batch
share one parallel region, the longest first.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from headrace.engine.attention.base import AttentionSpan
from headrace.engine.attention.slots import SlotWriter
from headrace.engine.kv.pool import KVPool
from headrace.engine.native import POOL_DTYPES, ItemRecord, Kernels, PassRecord, SpanRecord

ITEM_ROWS = 192  # query rows of a work item: more reuse each tile more often, fewer balance the threads better


class NativeAttention:
    """Attention by kernels.c, for CPU pools of any dtype; queries, keys and values of a pass are float32."""

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
        self._writer = SlotWriter(pool, spans)
        self._scale = math.log2(math.e) / math.sqrt(pool.geometry.head_dim)
        self._records = (SpanRecord * len(spans))()
        row = 0
        for record, span in zip(self._records, spans, strict=True):
            record.start, record.count, record.row, record.pages = span.start, span.count, row, span.pages.ctypes.data
            row += span.count
        self._pass: PassRecord | None = None  # made by the first attend(), which knows the number of query heads

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._writer.write(layer, keys_values)
        if self._pass is None:
            self._pass = self._plan(query.shape[1] // self._pool.geometry.kv_heads)
        return self._kernels.attend(self._pass, layer, query, keys_values, self._scale)

    def _plan(self, group: int) -> PassRecord:
        """The work items of a layer, the most expensive first. group: query heads per KV head."""
        geometry = self._pool.geometry
        tokens = max(1, ITEM_ROWS // group)
        items = sorted(self._items(tokens), key=self._cost, reverse=True)
        self._item_records = (ItemRecord * len(items))(*(ItemRecord(*item) for item in items))
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
        )

    def _items(self, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Fields of ItemRecord. tokens: per item, at most."""
        for index, span in enumerate(self._spans):
            for first in range(0, span.count, tokens):
                for head in range(self._pool.geometry.kv_heads):
                    yield index, head, first, min(tokens, span.count - first)

    def _cost(self, item: tuple[int, int, int, int]) -> int:
        """Scores to compute, per head of the group."""
        span, _, first, count = item
        return (self._spans[span].start + first + count) * count
