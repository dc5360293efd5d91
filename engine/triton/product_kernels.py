"""Triton kernel of matrix products that do what surrounds them, so that it is not read and written once more.

    before  rows are normed: RMSNorm has a factor for each row, and each product is linear in it, so its weights scale
            the columns of a tile as it comes, and that factor the sums at the end
    after   gated   silu(one half) * other half, both in one tile
            added   to the residual stream, with the sums of squares of what comes of it, for the next norm
            heads   norm and rotation of query and key heads, keys and values into their slots

Rows are those of one weight, or of experts, each of which has one; factors are in 16 or 32 bits, or in FP8 with scales
of blocks. Sums of an element are in the order of its inner elements, whatever other rows there are.

Imported where Triton is installed.
"""

import triton
import triton.language as tl

from headrace.engine.triton.kernels import gated, norm_and_turn


@triton.jit
def tile_of_expert(ends, tile, EXPERTS: tl.constexpr, TILE_M: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """Expert of a tile of rows, its first row, and where the expert's rows end; EXPERTS behind the last tile. Each
    expert's rows begin with a tile of their own. ends: of each expert's rows."""
    number = tl.arange(0, EXPERT_BLOCK)
    owned = number < EXPERTS
    stops = tl.load(ends + number, mask=owned, other=0)
    starts = tl.load(ends + number - 1, mask=owned & (number > 0), other=0)
    upto = tl.cumsum(tl.where(owned, (stops - starts + TILE_M - 1) // TILE_M, 0), 0)
    expert = tl.sum(((upto <= tile) & owned).to(tl.int32), 0)
    before = tl.max(tl.where(number < expert, upto, 0), 0)
    first = tl.sum(tl.where(number == expert, starts, 0), 0) + (tile - before) * TILE_M
    return expert, first, tl.sum(tl.where(number == expert, stops, 0), 0)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, x_scales, weight, w_scales, bias, out, ends, sources, norm, powers, squares,
    cos, sin, query_norm, key_norm, slots, first_slot,
    rows, columns, inner, apart, parts, eps, head_eps, step,
    FORM: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, QUERY: tl.constexpr, KV: tl.constexpr, HEADS_NORMED: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, EXPERT_BLOCK: tl.constexpr, PART_BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows, inner] @ weight [experts, ..., inner].T, and what follows by FORM. Grid: (tiles of rows * tiles of
    columns); with experts one more tile of rows for each.

    FORM "plain": out [rows, columns]. "gated": out [rows, columns], of weights of 2 * columns. "added": out [rows,
    columns] is added to; squares float32 [rows, tiles of columns]. "heads": a tile is a head, QUERY of which go to out,
    KV keys and KV values to slots. apart: rows of the weight between both halves of what a tile computes. EXPERTS: 0
    for one weight, of all rows. K: rows of x are tokens of K choices each, and sources has the choice that each row is
    of; 0: rows are as they are in x. NORMED: x is yet to be normed, by weights norm [inner] and powers [rows, parts],
    sums of squares. SCALED: in FP8, x has scales [rows, inner / BLOCK], and the weight one for BLOCK inputs of SHARED
    outputs. GROUP: tiles of rows that share columns while these are in the cache. WIDE: factors are widened first, for
    Triton's interpreter."""
    PAIRED: tl.constexpr = FORM == "gated" or FORM == "heads"
    # Some tiles of rows go through all columns before the next ones do.
    across = tl.cdiv(columns, TILE_N)
    tile, down = tl.program_id(0), tl.num_programs(0) // across
    group = tile // (GROUP * across)
    tall = tl.minimum(down - group * GROUP, GROUP)
    tile_m, tile_n = group * GROUP + tile % (GROUP * across) % tall, tile % (GROUP * across) // tall
    first, last = tile_m * TILE_M, rows
    expert = tile_m * 0  # a number of Triton's
    if EXPERTS:
        expert, first, last = tile_of_expert(ends, tile_m, EXPERTS, TILE_M, EXPERT_BLOCK)
        if expert >= EXPERTS:
            return
    row = first + tl.arange(0, TILE_M)
    there = row < last
    at = tl.arange(0, TILE_N)
    column = tile_n * TILE_N + at
    inside = column < columns
    of_weight = column
    outputs = columns
    if FORM == "heads":
        of_weight = tile_n * 2 * TILE_N + at
        outputs = 2 * columns
    if FORM == "gated":
        outputs = 2 * columns
    within = tl.arange(0, BLOCK)
    wide_row = row.to(tl.int64)
    source = wide_row
    if K:
        source = (tl.load(sources + row, mask=there, other=0) // K).to(tl.int64)
    of_output = expert.to(tl.int64) * outputs + of_weight
    of_x = x + source[:, None] * inner + within[None, :]
    of_one = weight + of_output[None, :] * inner + within[:, None]
    of_other = weight + (of_output + apart)[None, :] * inner + within[:, None]
    blocks = tl.cdiv(inner, BLOCK)
    if SCALED:
        x_scale = x_scales + source * blocks
        shared = expert.to(tl.int64) * tl.cdiv(outputs, SHARED)
        one_scale = w_scales + (shared + of_weight // SHARED) * blocks
        other_scale = w_scales + (shared + (of_weight + apart) // SHARED) * blocks
    one = tl.zeros([TILE_M, TILE_N], tl.float32)
    other = tl.zeros([TILE_M, TILE_N], tl.float32)
    for block in range(blocks):
        if EVEN:
            a = tl.load(of_x, mask=there[:, None], other=0.0)
            b = tl.load(of_one, mask=inside[None, :], other=0.0)
        else:
            left = within < inner - block * BLOCK
            a = tl.load(of_x, mask=there[:, None] & left[None, :], other=0.0)
            b = tl.load(of_one, mask=inside[None, :] & left[:, None], other=0.0)
        if NORMED:
            of_norm = tl.load(norm + block * BLOCK + within, mask=within < inner - block * BLOCK, other=0.0)
            a = (a.to(tl.float32) * of_norm.to(tl.float32)[None, :]).to(a.dtype)
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        if SCALED:
            of_a = tl.load(x_scale + block, mask=there, other=0.0)[:, None]
            of_b = tl.load(one_scale + block, mask=inside, other=0.0)[None, :]
            one += tl.dot(a, b) * of_a * of_b
        else:
            one = tl.dot(a, b, one, input_precision="ieee")
        if PAIRED:
            if EVEN:
                b = tl.load(of_other, mask=inside[None, :], other=0.0)
            else:
                b = tl.load(of_other, mask=inside[None, :] & left[:, None], other=0.0)
            if WIDE:
                b = b.to(tl.float32)
            if SCALED:
                of_b = tl.load(other_scale + block, mask=inside, other=0.0)[None, :]
                other += tl.dot(a, b) * of_a * of_b
            else:
                other = tl.dot(a, b, other, input_precision="ieee")
            of_other += BLOCK
        of_x += BLOCK
        of_one += BLOCK
    if NORMED:
        part = tl.arange(0, PART_BLOCK)
        known = there[:, None] & (part < parts)[None, :]
        power = tl.sum(tl.load(powers + wide_row[:, None] * parts + part[None, :], mask=known, other=0.0), 1)
        factor = tl.rsqrt(power / inner + eps)[:, None]
        one *= factor
        other *= factor
    if BIASED:
        one += tl.load(bias + of_weight, mask=inside, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            other += tl.load(bias + of_weight + apart, mask=inside, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    target = out + wide_row[:, None] * columns + column[None, :]
    stored = there[:, None] & inside[None, :]
    if FORM == "plain":
        tl.store(target, one.to(kind), mask=stored)
    elif FORM == "gated":
        tl.store(target, gated(one.to(kind), other.to(kind)), mask=stored)
    elif FORM == "added":
        before = tl.load(target, mask=stored, other=0.0).to(tl.float32)
        after = (before + one.to(kind).to(tl.float32)).to(kind)
        tl.store(target, after, mask=stored)
        wide = tl.where(stored, after.to(tl.float32), 0.0)
        tl.store(squares + wide_row * across + tile_n, tl.sum(wide * wide, 1), mask=there)
    else:
        head = tile_n
        turn = wide_row[:, None] * (2 * TILE_N) + at[None, :]
        c = tl.load(cos + turn, mask=there[:, None], other=0.0)
        s = tl.load(sin + turn + TILE_N, mask=there[:, None], other=0.0)
        of_low, of_high = c, c
        if HEADS_NORMED:
            of_head = query_norm if head < QUERY else key_norm
            of_low = tl.load(of_head + at)[None, :]
            of_high = tl.load(of_head + TILE_N + at)[None, :]
        low, high = one.to(kind), other.to(kind)
        turned_low, turned_high = norm_and_turn(low, high, of_low, of_high, c, s, head_eps, 2 * TILE_N, HEADS_NORMED)
        turned = head < QUERY + KV
        low = tl.where(turned, turned_low, low)
        high = tl.where(turned, turned_high, high)
        if head < QUERY:
            target = out + (wide_row[:, None] * QUERY + head) * (2 * TILE_N) + at[None, :]
            tl.store(target, low, mask=there[:, None])
            tl.store(target + TILE_N, high, mask=there[:, None])
        else:
            begin = tl.load(first_slot + row, mask=there, other=-1)
            target = slots + (begin + (head - QUERY).to(tl.int64) * step)[:, None] * (2 * TILE_N) + at[None, :]
            kept = (begin >= 0)[:, None]
            tl.store(target, low.to(slots.dtype.element_ty), mask=kept)
            tl.store(target + TILE_N, high.to(slots.dtype.element_ty), mask=kept)
