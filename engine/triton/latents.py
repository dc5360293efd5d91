"""Triton kernels of multi-head latent attention (MLA): the latents of a pass into the pool, rotation in pairs.

Each rounds where TorchArithmetic does. Imported where Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def norm_part(source, target, weight, eps, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of WIDTH elements from one place to another. kept: whether it is written."""
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    x = tl.load(source + at, mask=there, other=0.0)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    unit = (wide * factor).to(x.dtype).to(tl.float32)
    weighted = (unit * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(target + at, weighted.to(target.dtype.element_ty), mask=there & kept)


@triton.jit
def turned(low, high, cos, sin):
    """The elements 2i and 2i + 1 of rows, rotated."""
    a, b = low.to(tl.float32), high.to(tl.float32)
    return (a * cos - b * sin).to(low.dtype), (b * cos + a * sin).to(low.dtype)


@triton.jit
def place_latents(
    joined, query, latents, cos, sin, query_norm, latent_norm, first, eps,
    QUERY: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, PLACED: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm of the latents that queries, and keys and values, are made of; rotation of the shared key. Grid: (tokens,
    1), or 2 with a norm of the queries' latent, which the second program computes.

    joined: [tokens, QUERY + RANK + 2 * HALF]. query: [tokens, QUERY]. latents: [slots, RANK + 2 * HALF]. first: slot of
    each token, negative for none, where PLACED; else its own number."""
    token = tl.program_id(0).to(tl.int64)
    row = joined + token * (QUERY + RANK + 2 * HALF)
    if NORMED and tl.program_id(1) == 1:
        norm_part(row, query + token * QUERY, query_norm, eps, True, QUERY, QUERY_BLOCK)
    else:
        slot = token
        if PLACED:
            slot = tl.load(first + token)
        target = latents + slot * (RANK + 2 * HALF)
        norm_part(row + QUERY, target, latent_norm, eps, slot >= 0, RANK, RANK_BLOCK)
        pair = tl.arange(0, BLOCK)
        there = pair < HALF
        c = tl.load(cos + token * 2 * HALF + pair, mask=there, other=0.0)
        s = tl.load(sin + token * 2 * HALF + HALF + pair, mask=there, other=0.0)
        key = row + QUERY + RANK + 2 * pair
        low, high = turned(tl.load(key, mask=there, other=0.0), tl.load(key + 1, mask=there, other=0.0), c, s)
        tl.store(target + RANK + 2 * pair, low.to(latents.dtype.element_ty), mask=there & (slot >= 0))
        tl.store(target + RANK + 2 * pair + 1, high.to(latents.dtype.element_ty), mask=there & (slot >= 0))


@triton.jit
def rotate_pairs(
    x, cos, sin, heads, token_step, head_step, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rotation of heads in place, elements 2i and 2i + 1 together. Grid: (tokens, tiles of ROWS heads). Steps: elements
    from a token or head to the next. cos, sin: [tokens, 2 * HALF] of rotary_tables."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    there = (head < heads)[:, None] & inside[None, :]
    c = tl.load(cos + token * 2 * HALF + pair, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + token * 2 * HALF + HALF + pair, mask=inside, other=0.0)[None, :]
    at = x + token * token_step + head[:, None] * head_step + 2 * pair[None, :]
    low, high = turned(tl.load(at, mask=there, other=0.0), tl.load(at + 1, mask=there, other=0.0), c, s)
    tl.store(at, low, mask=there)
    tl.store(at + 1, high, mask=there)
