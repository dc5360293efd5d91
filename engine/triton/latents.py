"""Triton kernels of multi-head latent attention (MLA): the latents of a pass into the pool, rotation in pairs.

Each rounds where TorchArithmetic does. Imported where Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def normed_part(source, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of WIDTH elements."""
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    x = tl.load(source + at, mask=there, other=0.0)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    unit = (wide * factor).to(x.dtype).to(tl.float32)
    return (unit * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def turned(low, high, cos, sin):
    """The elements 2i and 2i + 1 of rows, rotated."""
    a, b = low.to(tl.float32), high.to(tl.float32)
    return (a * cos - b * sin).to(low.dtype), (b * cos + a * sin).to(low.dtype)


@triton.jit
def place_latents(
    joined, query, latents, slots, cos, sin, query_norm, latent_norm, first, eps,
    QUERY: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, PLACED: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm of the latents that queries, and keys and values, are made of; rotation of the shared key. Grid: (tokens,
    1), or 2 with a norm of the queries' latent, which the second program computes.

    joined: [tokens, QUERY + RANK + 2 * HALF]. query: [tokens, QUERY]. latents: [tokens, RANK + 2 * HALF]. slots: where
    they are written, too, if PLACED. first: slot of each token, negative for none."""
    token = tl.program_id(0).to(tl.int64)
    row = joined + token * (QUERY + RANK + 2 * HALF)
    if NORMED and tl.program_id(1) == 1:
        inner = tl.arange(0, QUERY_BLOCK)
        of_query = normed_part(row, query_norm, eps, QUERY, QUERY_BLOCK)
        tl.store(query + token * QUERY + inner, of_query, mask=inner < QUERY)
    else:
        at = tl.arange(0, RANK_BLOCK)
        latent = normed_part(row + QUERY, latent_norm, eps, RANK, RANK_BLOCK)
        pair = tl.arange(0, BLOCK)
        there = pair < HALF
        c = tl.load(cos + token * 2 * HALF + pair, mask=there, other=0.0)
        s = tl.load(sin + token * 2 * HALF + HALF + pair, mask=there, other=0.0)
        key = row + QUERY + RANK + 2 * pair
        low, high = turned(tl.load(key, mask=there, other=0.0), tl.load(key + 1, mask=there, other=0.0), c, s)
        target = latents + token * (RANK + 2 * HALF)
        tl.store(target + at, latent, mask=at < RANK)
        tl.store(target + RANK + 2 * pair, low, mask=there)
        tl.store(target + RANK + 2 * pair + 1, high, mask=there)
        if PLACED:
            slot = tl.load(first + token)
            target = slots + slot * (RANK + 2 * HALF)
            kind = slots.dtype.element_ty
            tl.store(target + at, latent.to(kind), mask=(at < RANK) & (slot >= 0))
            tl.store(target + RANK + 2 * pair, low.to(kind), mask=there & (slot >= 0))
            tl.store(target + RANK + 2 * pair + 1, high.to(kind), mask=there & (slot >= 0))


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
