"""Attention on GPUs by our own Triton kernel, which reads pages where they lie: of layers that other kernels do not
take, with windows, ranges, softcap, sinks, and keys and values of any widths; of plain ones, where it is the fastest.

Imported where Triton is installed.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter, page_table
from headrace.engine.attention.work import PagedRows, Ranges, RowWork
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots
from headrace.engine.triton import kernels
from headrace.engine.triton.launch import launch, power_of_2

LEAST_ROWS = 16  # of a tile: matrix units take no fewer
MOST_ROWS = 64  # queries of a tile, each head counted
WIDE_HEADS = 128  # elements; of wider ones a tile has half as many positions, to fit into shared memory
POSITIONS = 64  # of a tile


class TritonWork(RowWork):
    """Attention of one pass by the kernel `attend`. Tiles are planned once, for all layers, the longest first."""

    def __init__(
        self,
        spans: Sequence[AttentionSpan],
        rows: PagedRows,
        scale: float,
        *,
        softcap: float = 0.0,
        ranges: Ranges | None = None,
    ) -> None:
        """See MakeWork. rows: in pages whose slots lie one after the other. Raises ValueError for others."""
        assert rows.values is not None, "latents have another way"
        for part in (rows.keys, rows.values):
            if part.stride()[3:] != (part.shape[4], 1):
                raise ValueError("slots of a page do not lie one after the other")
        self._spans, self._keys, self._values = spans, rows.keys, rows.values
        self._scale, self._softcap, self._ranges = scale, softcap, ranges
        self._device = rows.keys.device
        self._tiles: Tensor | None = None  # made by the first attend(), which knows the number of query heads

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See RowWork."""
        tokens, heads, width = query.shape
        keys, values = self._keys[:, layer], self._values[:, layer]
        kv_heads, page_size, value_width = values.shape[1:]
        group = heads // kv_heads
        if self._tiles is None:
            self._plan(group)
        assert self._tiles is not None
        out = query.new_empty(tokens, heads, value_width)
        blocks = [max(16, power_of_2(size)) for size in (width, value_width)]
        launch(
            kernels.attend, (len(self._tiles), kv_heads), query, keys, values, self._table, self._tiles, self._begins,
            self._ends, query if sinks is None else sinks, out, self._scale, self._softcap, query.stride(0),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), self._table.stride(0),
            HEADS=heads, GROUP=group, WIDTH=width, VALUE_WIDTH=value_width, PAGE=page_size,
            RANGED=self._ranges is not None, CAPPED=self._softcap > 0, SINKS=sinks is not None,
            WIDE=kernels.INTERPRETED, TILE_M=self._rows,
            TILE_N=POSITIONS if max(blocks) <= WIDE_HEADS else POSITIONS // 2,
            BLOCK=blocks[0], VALUE_BLOCK=blocks[1], num_stages=2,
            num_warps=_warps(self._rows, max(blocks)),
        )  # fmt: skip
        return out

    def _plan(self, group: int) -> None:
        """Divide the rows into tiles, and place what the kernel looks up. group: query heads of a KV head."""
        longest = max(span.count for span in self._spans)
        most = max(LEAST_ROWS, min(MOST_ROWS, power_of_2(longest * group)))
        self._rows = max(most, power_of_2(group))
        each = self._rows // group
        tiles, first = [], 0
        for number, span in enumerate(self._spans):
            tiles += [
                (number, first + at, min(each, span.count - at), span.start + at) for at in range(0, span.count, each)
            ]
            first += span.count
        tiles.sort(key=lambda tile: tile[2] + tile[3], reverse=True)
        self._tiles = place(np.array(tiles, np.int32), self._device)
        self._table = place(page_table(self._spans, self._keys.shape[3]), self._device)
        self._begins, self._ends = self._table, self._table
        if self._ranges is not None:
            self._begins, self._ends = (place(part, self._device) for part in self._ranges)


class TritonPass(AttentionPass):
    """An AttentionPass by the kernel `attend`, for pools of keys and values on GPUs: one launch per layer."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of what is written. pool: on a GPU."""
        self._writer = SlotWriter(pool, spans)
        rows = PagedRows.of_pool(pool)
        self._work = TritonWork(spans, rows, rows.value_width**-0.5)

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        return self._work.attend(layer, query)


def _warps(rows: int, width: int) -> int:
    """Of a tile: as many as its registers need."""
    if rows == LEAST_ROWS:
        return 2
    return 8 if width > WIDE_HEADS else 4
