"""Attention on GPUs in 16-bit dtypes: FlashAttention (arXiv 2307.08691), one variable-length call for all rows.

The kernel reads pages of a multiple of 256 tokens where they are. Out of others keys and values are gathered first,
once per layer. Queries, keys and values may be strided as long as each head is dense, so nothing else is copied.

Imported where it is chosen: torch's module takes a second to import, and is not in every torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter, page_table, slot_index
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots

CAUSAL = (-1, 0)  # window: all keys to the left; the last query is aligned with the last key
# Before torch 2.12 the kernel's rule alone says whether heads may share keys and values.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
PAGED = {"block_table", "seqused_k", "num_splits"} <= set(signature(varlen_attn).parameters)  # not in torch 2.11
PAGE_STEP = 256  # tokens; the kernel takes pages of multiples of it
KEPT_ENDS = 256  # lengths of rows that are kept on the device: those of a pass are the same in all layers


def reads_pages(pool: KVPool) -> bool:
    """Whether the kernel reads keys and values in the pages of a pool, where they are."""
    return PAGED and pool.page_size % PAGE_STEP == 0


class VarlenPass(AttentionPass):
    """An AttentionPass by torch.nn.attention.varlen, for float16 and bfloat16 on CUDA: one kernel call per layer, and
    before it a gather of all keys and values of the batch, unless reads_pages()."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows. pool: on a GPU, in a 16-bit dtype."""
        self._pool = pool
        self._writer = SlotWriter(pool, spans)
        self._longest_query = max(span.count for span in spans)
        lengths = [span.start + span.count for span in spans]
        self._longest_key = max(lengths)
        device = pool.tensor.device
        self._query_ends = _ends([span.count for span in spans], device)
        self._key_ends = _ends(lengths, device)
        self._slots: Tensor | None = None
        self._paged: dict[str, Any] = {}
        if reads_pages(pool):
            self._paged = {
                "seqused_k": place(np.array(lengths, np.int32), device),
                "block_table": place(page_table(spans, pool.page_size), device),
                "num_splits": 1,  # else a row would be divided, and rounded, by what is beside it in the batch
            }
        else:
            self._slots = slot_index(pool, spans, prefixes=True)

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        keys, values = self._keys_values(layer)
        attended = varlen_attn(
            query,
            keys,
            values,
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_key,
            window_size=CAUSAL,
            **(GROUPED if query.shape[1] != self._pool.geometry.kv_heads else {}),
            **self._paged,
        )
        assert isinstance(attended, Tensor)
        return attended

    def _keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of a layer: those of the rows [positions, kv_heads, head_dim], or pages [pages, page_size, kv_heads,
        head_dim]."""
        if self._slots is None:
            keys, values = self._pool.tensor[:, layer].transpose(2, 3).unbind(1)
        else:
            geometry = self._pool.geometry
            rows = self._pool.slots_from(layer).index_select(0, self._slots)
            keys, values = rows.view(-1, 2 * geometry.kv_heads, geometry.head_dim).chunk(2, dim=1)
        return keys, values


class VarlenDense:
    """DenseAttention by FlashAttention-2, for float16 and bfloat16 on CUDA, of keys and values of one width, a multiple
    of 8 elements."""

    def __init__(self, scale: float) -> None:
        """scale: of the scores."""
        self._scale = scale
        self._ends = lru_cache(KEPT_ENDS)(lambda count, device: _ends([count], device))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See DenseAttention."""
        tokens, positions = len(query), len(keys)
        ends = [self._ends(count, query.device) for count in (tokens, positions)]
        attended = varlen_attn(
            query,
            keys,
            values,
            ends[0],
            ends[1],
            tokens,
            positions,
            scale=self._scale,
            window_size=CAUSAL,
        )
        assert isinstance(attended, Tensor)
        return attended


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    """Cumulative lengths (cu_seqlens): int32 [rows + 1], from 0, on the device."""
    return place(np.cumsum([0, *lengths], dtype=np.int32), device)
