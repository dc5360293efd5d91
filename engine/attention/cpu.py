"""Attention on the CPU by torch's flash attention kernel (arXiv 2205.14135) over gathered pages.

A prompt chunk is halved recursively. The second half attends to the first, where no mask is needed; only the small
blocks on the diagonal need a causal mask, and there the kernel wastes half of the work:

    ▙ · · ·        ▙  a block on the diagonal, at most DIAGONAL tokens
    █ ▙ · ·        █  halves that attend to halves, the larger the faster
    █ █ ▙ ·
    █ █ █ ▙        left of it all: the pages before the chunk, one call

Partial results are merged by their log-sum-exp, so no buffer of prompt length squared exists. Only the positions before
the chunk are gathered from the pool, once per layer, at the speed of a memory copy. Single-token rows are batched by
similar length. 16-bit keys and values are converted to float32 unless the CPU has matrix units for their dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter
from headrace.engine.kv.pool import KVPool

DIAGONAL = 128  # larger blocks waste more on masked scores, smaller ones are slower to multiply
GROUP_BYTES = 64 << 20  # of gathered keys and values of one group of single-token rows
GROUP_SPREAD = 1.5  # longest to shortest row in a group; above it padding costs more than another call


class CpuPass(AttentionPass):
    """An AttentionPass by scaled_dot_product flash attention on the CPU, in any dtype: chunks one by one, single-token
    rows in groups."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan], compute_dtype: torch.dtype) -> None:
        """Prepare the indices of all rows. compute_dtype: dtype in which the kernel multiplies."""
        self._writer = SlotWriter(pool, spans)
        self._compute_dtype = compute_dtype
        self._chunks: list[_Chunk] = []
        singles: list[tuple[int, AttentionSpan]] = []
        offset = 0
        for span in spans:
            if span.count == 1:
                singles.append((offset, span))
            else:
                self._chunks.append(_Chunk(pool, compute_dtype, span, offset))
            offset += span.count
        self._groups = [_Group(pool, compute_dtype, members) for members in group_by_length(pool, singles)]

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass."""
        self._writer.write(layer, keys_values)
        output = torch.empty_like(query)
        for chunk in self._chunks:
            chunk.attend(layer, query, keys_values, output)
        for group in self._groups:
            group.attend(layer, query, output)
        return output


class _Chunk:
    """A row of several tokens at batch rows [offset, offset + count)."""

    def __init__(self, pool: KVPool, compute_dtype: torch.dtype, span: AttentionSpan, offset: int) -> None:
        self._pool = pool
        self._compute_dtype = compute_dtype
        self._start = span.start
        self._rows = slice(offset, offset + span.count)
        pages = torch.from_numpy(span.pages[: pool.geometry.pages_for(span.start)])
        heads = torch.arange(pool.blocks_per_layer)
        self._blocks = (pages * pool.blocks_per_page + heads[:, None]).reshape(-1)  # int64 [2 * kv_heads * pages]

    def attend(self, layer: int, query: Tensor, keys_values: Tensor, output: Tensor) -> None:
        """Fill this row's part of output [tokens, heads, head_dim]; only positions before the chunk are read from the
        pool. Shapes as in AttentionPass.attend."""
        queries = _heads_first(query[self._rows], self._compute_dtype)
        keys, values = _heads_first(keys_values[self._rows], self._compute_dtype).chunk(2, dim=1)
        filled = output[self._rows].transpose(0, 1)[None]
        # Parts are merged in float32 and rounded once.
        attended = filled if filled.dtype == torch.float32 else torch.empty(filled.shape)
        lse = torch.empty(filled.shape[:3])
        _causal(queries, keys, values, attended, lse)
        if self._start:
            _merge(attended, lse, *_flash(queries, *self._gather(layer), causal=False))
        if attended is not filled:
            filled.copy_(attended)

    def _gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions before the chunk: [1, kv_heads, positions, head_dim] each."""
        geometry = self._pool.geometry
        blocks = self._pool.blocks.index_select(0, self._blocks + layer * self._pool.blocks_per_layer)
        positions = len(self._blocks) // self._pool.blocks_per_layer * geometry.page_size
        gathered = blocks.view(2, 1, geometry.kv_heads, positions, geometry.head_dim)[:, :, :, : self._start]
        keys, values = gathered.to(self._compute_dtype).unbind(0)
        return keys, values


class _Group:
    """Single-token rows of similar length, padded to the longest one. Padding is zeroed, then masked."""

    def __init__(self, pool: KVPool, compute_dtype: torch.dtype, members: list[tuple[int, AttentionSpan]]) -> None:
        self._pool = pool
        self._compute_dtype = compute_dtype
        self._rows = torch.tensor([row for row, _ in members])  # int64 [rows] of the batch
        self._lengths = [span.start + 1 for _, span in members]
        pages = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(span.pages[: pool.geometry.pages_for(span.start + 1)]) for _, span in members],
            batch_first=True,
        )
        heads = torch.arange(pool.blocks_per_layer)
        self._blocks = (pages[:, None] * pool.blocks_per_page + heads[:, None]).reshape(-1)
        positions = torch.arange(pages.shape[1] * pool.geometry.page_size)
        beyond = positions >= torch.tensor(self._lengths)[:, None]
        self._mask = torch.zeros(beyond.shape, dtype=compute_dtype).masked_fill_(beyond, -torch.inf)[:, None, None]

    def attend(self, layer: int, query: Tensor, output: Tensor) -> None:
        """Fill the rows of output [tokens, heads, head_dim] that belong to the group; query has the same shape."""
        geometry, rows = self._pool.geometry, len(self._lengths)
        blocks = self._pool.blocks.index_select(0, self._blocks + layer * self._pool.blocks_per_layer)
        gathered = blocks.view(rows, 2 * geometry.kv_heads, -1, geometry.head_dim)
        for row, length in enumerate(self._lengths):
            gathered[row, :, length:].zero_()  # zero weight times NaN would be NaN
        keys, values = gathered.to(self._compute_dtype).chunk(2, dim=1)
        # Query heads that share a KV head take the axis of positions: the kernel then reads each key once.
        queries = query[self._rows].to(self._compute_dtype).view(rows, geometry.kv_heads, -1, geometry.head_dim)
        attended, _ = _flash(queries, keys, values, causal=False, mask=self._mask)
        output[self._rows] = attended.reshape(rows, -1, geometry.head_dim).to(output.dtype)


def group_by_length(pool: KVPool, singles: list[tuple[int, AttentionSpan]]) -> list[list[tuple[int, AttentionSpan]]]:
    """Group (batch row, span) of single-token rows by similar length, each group within GROUP_BYTES."""
    token_bytes = pool.geometry.token_bytes // pool.geometry.layers
    groups: list[list[tuple[int, AttentionSpan]]] = []
    for member in sorted(singles, key=lambda item: item[1].start):
        length = member[1].start + 1
        group = groups[-1] if groups else []
        fits = group and (len(group) + 1) * length * token_bytes <= GROUP_BYTES
        if fits and length <= GROUP_SPREAD * (group[0][1].start + 1 + pool.geometry.page_size):
            group.append(member)
        else:
            groups.append([member])
    return groups


def _causal(query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor) -> None:
    """Causal attention of a chunk to itself, by recursive halving.

    query: [1, heads, positions, head_dim]; keys, values: [1, kv_heads, positions, head_dim]. Fills float32 output
    (query's shape) and lse [1, heads, positions].
    """
    positions = query.shape[2]
    if positions <= DIAGONAL:
        attended, sums = _flash(query, keys, values, causal=True)
        output.copy_(attended)
        lse.copy_(sums)
        return
    half = ceil_div(positions, DIAGONAL) * (DIAGONAL // 2)
    for part in (slice(half), slice(half, None)):
        _causal(query[:, :, part], keys[:, :, part], values[:, :, part], output[:, :, part], lse[:, :, part])
    first = _flash(query[:, :, half:], keys[:, :, :half], values[:, :, :half], causal=False)
    _merge(output[:, :, half:], lse[:, :, half:], *first)


def _merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge two partial attention results over disjoint keys into output and lse, by their log-sum-exp.

    output, other: [1, heads, positions, head_dim]; lse, other_lse: [1, heads, positions].
    """
    output.lerp_(other.to(output.dtype), torch.sigmoid(other_lse - lse)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)


def _heads_first(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim], a view where the dtype allows."""
    return rows.to(dtype).transpose(0, 1)[None]


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The operator behind scaled_dot_product_attention, which also returns the log-sum-exp of the scores.

    query: [batch, heads, queries, head_dim]; keys, values: [batch, kv_heads, keys, head_dim], where kv_heads divides
    heads. Returns output (query's shape) and log-sum-exp [batch, heads, queries].
    """
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask
    )
    return output, lse
