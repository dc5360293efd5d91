"""What an attention is tried with before it is used: whether it agrees with plain torch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.engine.attention.paged import AttentionPass, AttentionSpan
from headrace.engine.attention.work import RowWork
from headrace.engine.kv.pool import KVPool

LARGEST_GAP = 0.1  # between two results: roundings to bfloat16 of values around 1 are far below it
TRIED_TOKENS = (1, 2, 4, 8, 16)

Tried = Callable[[Sequence[AttentionSpan]], AttentionPass | RowWork]
"""Attention to what one pool has, on a GPU, where it writes nothing itself."""


def check_agreement(tried: Tried, plain: Tried, pool: KVPool, heads: int) -> None:
    """Compare an attention with a plain one: chunks of several lengths, for which there are kernels of several sizes,
    behind a prefix in the first and the last page of the pool, which are overwritten. heads: of queries. Raises
    RuntimeError for other results, and whatever the kernels and their compilers raise."""
    pages = np.unique([pool.pages - 1, 0])[::-1].astype(np.int64)
    layer = pool.tensor.shape[1] - 1
    for page in pages:
        pool.tensor[int(page), layer].normal_()
    positions = len(pages) * pool.page_size
    longest = positions - min(pool.page_size // 2, positions - 1)
    for count in (longest, *(count for count in TRIED_TOKENS if count < longest)):
        span = AttentionSpan(positions - count, count, pages)
        query = _random(pool, count, heads)
        one, other = (_attending(begin, span)(layer, query) for begin in (tried, plain))
        gap = (one - other).float().abs().max().item()
        if not gap <= LARGEST_GAP:
            raise RuntimeError(f"its attention differs from torch's by {gap:.2g}")


def _attending(begin: Tried, span: AttentionSpan) -> Callable[[int, Tensor], Tensor]:
    """Of one row: takes a layer and queries."""
    running = begin([span])
    if isinstance(running, AttentionPass):
        attend = running.attend
        return lambda layer, query: attend(layer, query, query[:, :0])
    return running.attend


def _random(pool: KVPool, tokens: int, heads: int) -> Tensor:
    """Queries [tokens, heads, head_dim] in the pool's dtype."""
    width = pool.tensor.shape[-1]
    return torch.randn(tokens, heads, width, device=pool.tensor.device).to(pool.tensor.dtype)
