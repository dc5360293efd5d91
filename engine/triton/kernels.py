"""Triton kernels of a layer beside attention and products in 16 bits: RMSNorm with residual, rotary embedding with the
write of keys and values, SwiGLU gate, the rows of a mixture of experts, and products in FP8.

Each rounds where TorchArithmetic does. Imported where Triton is installed.
"""

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether these kernels are run by Triton's interpreter, on the CPU. It multiplies raw bits of what is no float32."""


@triton.jit
def add_norm(hidden, delta, weight, normed, width, eps, step, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of a row, to which delta is added first. Grid: (rows). step: elements from a row of hidden to another."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(hidden + row * step + at, mask=there, other=0.0)
    if ADDS:
        added = x.to(tl.float32) + tl.load(delta + row * width + at, mask=there, other=0.0).to(tl.float32)
        x = added.to(x.dtype)
        tl.store(hidden + row * step + at, x, mask=there)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    unit = (wide * factor).to(x.dtype).to(tl.float32)
    weighted = unit * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * width + at, weighted.to(x.dtype), mask=there)


@triton.jit
def gated(first, second):
    """silu(first) * second, rounded as separate steps round it."""
    wide = first.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(first.dtype).to(tl.float32)
    return (silu * second.to(tl.float32)).to(first.dtype)


@triton.jit
def gate(gate_up, activated, count, width, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """silu(first half) * second half of a row. Grid: (rows, tiles of width). count: how many rows there are, where not
    all are."""
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:  # noqa: SIM102  constants are decided at compilation
        if row >= tl.load(count):
            return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    first = tl.load(gate_up + row * 2 * width + at, mask=there, other=0.0)
    second = tl.load(gate_up + row * 2 * width + width + at, mask=there, other=0.0)
    tl.store(activated + row * width + at, gated(first, second), mask=there)


@triton.jit
def norm_and_turn(low, high, of_low, of_high, c, s, eps, width, NORMED: tl.constexpr):
    """RMSNorm, if NORMED, and rotation of heads whose halves are low and high [heads, width / 2]. of_low, of_high:
    weights of the norm. c, s: of rotary_tables, of the second half: cos is the same in the first one, sin negative."""
    kind = low.dtype
    if NORMED:
        a, b = low.to(tl.float32), high.to(tl.float32)
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / width + eps)[:, None]
        low = ((a * factor).to(kind).to(tl.float32) * of_low.to(tl.float32)).to(kind)
        high = ((b * factor).to(kind).to(tl.float32) * of_high.to(tl.float32)).to(kind)
    a, b = low.to(tl.float32), high.to(tl.float32)
    return (a * c - b * s).to(kind), (b * c + a * s).to(kind)


@triton.jit
def place_heads(
    heads, cos, sin, query_norm, key_norm, slots, first, eps, step,
    QUERY: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, PLACED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of query and key heads in place, keys and values into their slots. Grid: (tokens, tiles of ROWS
    heads). heads: [tokens, QUERY + 2 * KV, 2 * HALF]. first: slot of a token's first key head, negative for none; step:
    slots from one head to the next."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, BLOCK)
    inside = (half < HALF)[None, :]
    there = (head < QUERY + 2 * KV)[:, None] & inside
    low_at = (token * (QUERY + 2 * KV) + head[:, None]) * (2 * HALF) + half[None, :]
    low = tl.load(heads + low_at, mask=there, other=0.0)
    high = tl.load(heads + low_at + HALF, mask=there, other=0.0)
    is_query = (head < QUERY)[:, None]
    of_low, of_high = low, high
    if NORMED:
        of_query = tl.load(query_norm + half, mask=half < HALF, other=0.0)[None, :]
        of_key = tl.load(key_norm + half, mask=half < HALF, other=0.0)[None, :]
        of_low = tl.where(is_query, of_query, of_key)
        of_query = tl.load(query_norm + HALF + half, mask=half < HALF, other=0.0)[None, :]
        of_key = tl.load(key_norm + HALF + half, mask=half < HALF, other=0.0)[None, :]
        of_high = tl.where(is_query, of_query, of_key)
    turn_at = token * (2 * HALF) + half
    c = tl.load(cos + turn_at, mask=half < HALF, other=0.0)[None, :]
    s = tl.load(sin + turn_at + HALF, mask=half < HALF, other=0.0)[None, :]
    turned_low, turned_high = norm_and_turn(low, high, of_low, of_high, c, s, eps, 2 * HALF, NORMED)
    turned = (head < QUERY + KV)[:, None]
    low = tl.where(turned, turned_low, low)
    high = tl.where(turned, turned_high, high)
    kept = there & turned
    if PLACED:
        kept = there & (head < QUERY)[:, None]
        begin = tl.load(first + token)
        of_kv = there & (head >= QUERY)[:, None] & (begin >= 0)
        slot = begin + (head - QUERY)[:, None].to(tl.int64) * step
        target = slots + slot * (2 * HALF) + half[None, :]
        tl.store(target, low.to(slots.dtype.element_ty), mask=of_kv)
        tl.store(target + HALF, high.to(slots.dtype.element_ty), mask=of_kv)
    tl.store(heads + low_at, low, mask=kept)
    tl.store(heads + low_at + HALF, high, mask=kept)


@triton.jit(do_not_specialize=["first", "last"])
def choose(
    logits, bias, experts, weights, step, scaling, smallest, first, last,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO_BEST: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALIZED: tl.constexpr, ROUNDED: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """The best K experts of a token, and their weights. Grid: (tokens). See expert_choice.choose()."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < EXPERTS
    raw = tl.load(logits + row * step + at, mask=there, other=float("-inf"))
    kind = raw.dtype
    wide = raw.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-wide))
    else:
        powers = tl.exp(wide - tl.max(wide, 0))
        scores = powers / tl.sum(powers, 0)
    ranked = scores
    if BIASED:
        ranked = scores + tl.load(bias + at, mask=there, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, 0.0)  # what is no number is chosen last, but chosen
    if GROUPS > 1:
        group = at // (EXPERTS // GROUPS)
        groups = tl.arange(0, GROUP_BLOCK)
        best_of = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            inside = tl.where((group == number) & there, ranked, float("-inf"))
            value = tl.max(inside, 0)
            if TWO_BEST:
                value += tl.max(tl.where(at == tl.argmax(inside, 0), float("-inf"), inside), 0)
            best_of = tl.where(groups == number, value, best_of)
        eligible = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(best_of, 0)
            eligible = eligible | (group == best)
            best_of = tl.where(groups == best, float("-inf"), best_of)
        ranked = tl.where(eligible, ranked, float("-inf") if TWO_BEST else 0.0)
    ranked = tl.where(there, ranked, float("-inf"))
    number = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    of_chosen = tl.zeros([K_BLOCK], tl.float32)
    total = 0.0
    for each in tl.static_range(K):
        best = tl.argmax(ranked, 0)
        weight = tl.sum(tl.where(at == best, scores, 0.0), 0)
        total += weight
        chosen = tl.where(number == each, best, chosen)
        of_chosen = tl.where(number == each, weight, of_chosen)
        ranked = tl.where(at == best, float("-inf"), ranked)
    if NORMALIZED:
        of_chosen = of_chosen / (total + smallest)
    if ROUNDED:
        of_chosen = of_chosen.to(kind).to(tl.float32)
    of_token = row * (K + SHARED)
    tl.store(experts + of_token + number, chosen.to(tl.int64), mask=number < K)
    tl.store(weights + of_token + number, of_chosen * scaling, mask=number < K)
    if SHARED:
        goes = (row >= first) & (row < last)
        tl.store(experts + of_token + K, tl.where(goes, EXPERTS, -1).to(tl.int64))
        tl.store(weights + of_token + K, 1.0)


@triton.jit
def held_choices(experts, place, total, first_expert, shared, OWN: tl.constexpr, SHARED: tl.constexpr):
    """Of choices: the number of each one's expert among those that are held, the shared ones last; whether it is held,
    and whether there is a choice."""
    there = place < total
    number = tl.load(experts + place, mask=there, other=-1).to(tl.int32)
    local = number - first_expert
    held = (local >= 0) & (local < OWN) & there
    if SHARED:
        local = tl.where((number == shared) & there, OWN, local)
        held = held | ((number == shared) & there)
    return local, held, there


@triton.jit(do_not_specialize=["total"])  # it differs from pass to pass
def place_rows(
    experts, counts, ends, sources, places, total, first_expert, shared,
    OWN: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the rows of a rank's experts are, which are counted and placed by one program each, in the order of tokens.
    Grid: (OWN experts, and the shared one where SHARED, whose number is shared).

    experts: of all choices [total]. ends: of each expert's rows; sources: the choice of each row; places: the row of
    each choice, negative for experts of other ranks. counts: rows of each expert, added to."""
    mine = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = mine * 0  # a number of Triton's
    own = mine * 0
    for begin in range(0, total, BLOCK):
        local, held, there = held_choices(experts, begin + at, total, first_expert, shared, OWN, SHARED)
        before += tl.sum((held & (local < mine)).to(tl.int32), 0)
        own += tl.sum((held & (local == mine)).to(tl.int32), 0)
    tl.store(ends + mine, before + own)
    if mine < OWN:
        tl.store(counts + mine, tl.load(counts + mine) + own.to(tl.int64))
    for begin in range(0, total, BLOCK):
        local, held, there = held_choices(experts, begin + at, total, first_expert, shared, OWN, SHARED)
        chosen = held & (local == mine)
        row = before + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(sources + row, begin + at, mask=chosen)
        tl.store(places + begin + at, row, mask=chosen)
        if mine == 0:
            tl.store(places + begin + at, tl.zeros([BLOCK], tl.int32) - 1, mask=there & (held == 0))
        before += tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def take_rows(x, rows, sources, count, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of tokens in the order of experts. Grid: (choices, tiles of width). count: how many rows there are."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    token = (tl.load(sources + row) // K).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    tl.store(rows + row * width + at, tl.load(x + token * width + at, mask=there, other=0.0), mask=there)


@triton.jit
def combine_rows(results, weights, places, sums, count, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Weighted sums of experts' results, in the order of a token's choices. Grid: (tokens, tiles of width)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    rows = tl.load(count)
    total = tl.zeros([BLOCK], tl.float32)
    for each in tl.static_range(K):
        place = tl.load(places + token * K + each)
        if (place >= 0) & (place < rows):
            result = tl.load(results + place.to(tl.int64) * width + at, mask=there, other=0.0)
            total += result.to(tl.float32) * tl.load(weights + token * K + each)
    tl.store(sums + token * width + at, total.to(sums.dtype.element_ty), mask=there)


@triton.jit
def quantize_rows(x, values, scales, count, blocks, COUNTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of `blocks` times BLOCK elements in FP8, with a scale for each block. Grid: (rows, tiles of TILE blocks)."""
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:  # noqa: SIM102  constants are decided at compilation
        if row >= tl.load(count):
            return
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = block < blocks
    at = (row * blocks + block)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wide = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 1), 1e-12) / 448.0
    tl.store(values + at, (wide / scale[:, None]).to(values.dtype.element_ty), mask=there[:, None])
    tl.store(scales + row * blocks + block, scale, mask=there)


@triton.jit
def attend(
    query, keys, values, table, tiles, begins, stops, sinks, out, scale, cap,
    query_step, key_page, key_head, value_page, value_head, table_step,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    RANGED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention over pages, by online softmax (FlashAttention-2, arXiv 2307.08691). Grid: (tiles, KV heads).

    query [tokens, HEADS, WIDTH] of any step between tokens; keys and values of one layer, PAGE dense slots in a page
    for each head; table: pages of each row. tiles: row, first token of the batch, how many tokens, and the first one's
    position; query heads of one KV head share a tile, token by token. begins, stops: the positions that each token
    attends to, which do not decrease; else all up to itself. cap: of scores that become cap * tanh(score / cap). sinks:
    one more score of each head. WIDE: factors are widened first, for Triton's interpreter."""
    row = tl.load(tiles + tl.program_id(0) * 4)
    first = tl.load(tiles + tl.program_id(0) * 4 + 1)
    count = tl.load(tiles + tl.program_id(0) * 4 + 2)
    start = tl.load(tiles + tl.program_id(0) * 4 + 3)
    head = tl.program_id(1)
    pair = tl.arange(0, TILE_M)
    token, member = pair // GROUP, head * GROUP + pair % GROUP
    there = token < count
    inner, outer = tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
    of_query = (first + token).to(tl.int64)[:, None] * query_step + member[:, None] * WIDTH + inner[None, :]
    q = tl.load(query + of_query, mask=there[:, None] & (inner < WIDTH)[None, :], other=0.0)
    if RANGED:
        begin = tl.load(begins + first + token, mask=there, other=0)
        stop = tl.load(stops + first + token, mask=there, other=0)
        from_place, to_place = tl.load(begins + first), tl.load(stops + first + count - 1)
    else:
        begin = tl.zeros([TILE_M], tl.int32)
        stop = start + token + 1
        from_place, to_place = 0, start + count
    if SINKS:
        best = tl.load(sinks + member, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full([TILE_M], 1.0, tl.float32)
    else:
        best = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
    sums = tl.zeros([TILE_M, VALUE_BLOCK], tl.float32)
    for at in range(from_place // TILE_N * TILE_N, to_place, TILE_N):
        place = at + tl.arange(0, TILE_N)
        known = (place >= from_place) & (place < to_place)
        page = tl.load(table + row * table_step + place // PAGE, mask=known, other=0).to(tl.int64)
        key_at = page * key_page + head * key_head + (place % PAGE) * WIDTH
        k = tl.load(keys + key_at[None, :] + inner[:, None], mask=known[None, :] & (inner < WIDTH)[:, None], other=0.0)
        if WIDE:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32))
        else:
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        scores *= scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
        seen = (place[None, :] >= begin[:, None]) & (place[None, :] < stop[:, None]) & known[None, :]
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        lowest = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - lowest[:, None])
        shrink = tl.exp2(best - lowest)
        value_at = page * value_page + head * value_head + (place % PAGE) * VALUE_WIDTH
        inside = known[:, None] & (outer < VALUE_WIDTH)[None, :]
        v = tl.load(values + value_at[:, None] + outer[None, :], mask=inside, other=0.0)
        if WIDE:
            sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype).to(tl.float32), v.to(tl.float32))
        else:
            sums = tl.dot(weights.to(q.dtype), v.to(q.dtype), sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    attended = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    of_out = ((first + token).to(tl.int64)[:, None] * HEADS + member[:, None]) * VALUE_WIDTH + outer[None, :]
    tl.store(out + of_out, attended.to(out.dtype.element_ty), mask=there[:, None] & (outer < VALUE_WIDTH)[None, :])
