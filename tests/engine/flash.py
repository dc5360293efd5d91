"""torch's variable-length flash kernel for GPUs, computed by its definition on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """aten::_flash_attention_forward, which torch has for CUDA only."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash_attention, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest_query: int,
    longest_key: int, dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int,
    window_size_right: int, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What mha_varlen_fwd (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) demands and computes."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert query_ends.is_contiguous()
    assert key_ends.is_contiguous()
    assert query_ends.shape == key_ends.shape
    if block_table is not None:
        key, value = (_in_order(pages, block_table, seqused_k, key_ends) for pages in (key, value))
        assert num_splits == 1, "divided by what is in the batch"
    assert (len(query), len(key), len(value)) == (query_ends[-1], key_ends[-1], key_ends[-1])
    assert (longest_query, longest_key) == (query_ends.diff().max(), key_ends.diff().max())
    assert (dropout, causal, debug, window_size_left, window_size_right) == (0, True, False, -1, 0)
    output = torch.empty_like(query)
    for row in range(len(query_ends) - 1):
        rows, columns = slice(*query_ends[row : row + 2].tolist()), slice(*key_ends[row : row + 2].tolist())
        heads = (part.float().transpose(0, 1) for part in (query[rows], key[columns], value[columns]))
        before = columns.stop - columns.start - (rows.stop - rows.start)
        visible = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool).tril(before)
        attended = F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=scale, enable_gqa=True)
        output[rows] = attended.transpose(0, 1).to(query.dtype)
    unused = torch.empty(0)
    return output, unused, unused, unused, unused


def _in_order(pages: Tensor, table: Tensor, lengths: Tensor | None, ends: Tensor) -> Tensor:
    """Keys or values of all rows, out of pages [pages, page_size, kv_heads, head_dim]."""
    assert lengths is not None
    assert table.dtype == lengths.dtype == torch.int32
    assert lengths.is_contiguous()
    assert len(table) == len(lengths)
    assert table.stride(-1) == 1
    assert pages.shape[1] % 256 == 0
    assert torch.equal(lengths, ends.diff())
    return torch.cat([pages[row].flatten(0, 1)[:length] for row, length in zip(table, lengths.tolist(), strict=True)])
