"""Digests of KV in a rank's pool (core/types/kv/kv_digests.py)."""

from hashlib import sha256

import torch

from headrace.core.types.kv.kv_digests import DigestPages, DigestPart
from headrace.core.types.packed import unpack
from headrace.engine.kv.pool import PagedTensors


def digest_pages(pool: PagedTensors, wanted: DigestPages) -> tuple[DigestPart, ...]:
    """Digests of all tensors of a pool that have pages, states left out. On a GPU it waits for the work that is queued.

    Raises IndexError for a page outside the pool.
    """
    ids = list(unpack(wanted.pages))
    positions = slice(wanted.first, wanted.first + wanted.count)
    parts = []
    for part in (part for part in pool.geometry.tensors if not part.per_request):
        pages = pool.tensors[part.name][ids].cpu()  # [pages, layers, planes, heads, page size, head_dim]
        rows = pages.permute(1, 3, 2, 0, 4, 5).flatten(3, 4)[:, :, :, positions].contiguous()
        heads = rows.view(-1).view(torch.uint8).numpy().reshape(part.layers * part.kv_heads, -1)
        units = b"".join(sha256(head.tobytes()).digest() for head in heads)
        parts.append(DigestPart(part.name, part.layer_start, part.head_start, part.kv_heads, units))
    return tuple(parts)
