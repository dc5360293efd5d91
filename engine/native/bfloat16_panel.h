/* Attention of a panel of queries to a tile of keys in bfloat16, the inner loops of attention_bfloat16.h.
 *
 * Both products of attention have the same form,
 *
 *     scores[key][lane]  = sum over pairs d of  key[key][d] (one pair, broadcast) . queries[d][lane]
 *     outputs[d][lane]  += sum over pairs j of  values[j][d] (one pair, broadcast) . powers[j][lane]
 *
 * with a dot product of pairs, two bfloat16 into a float32. STEP broadcasts times the vectors of a panel are 16 sums,
 * enough to hide the latency of the instruction (6 cycles at two in a cycle). A pair along the width is 32 neighbouring
 * bits of a key, which is therefore read in place, in the page. Values are interleaved by twos, tile by tile.
 *
 * Scores never leave the registers as float32. Their powers are taken relative to `top`, a score that the row has seen:
 * at first that of the first position that it attends to. A top that is too low does no harm until the powers overflow, so
 * there is no running maximum: only for rows whose sum has passed LIMIT is the top raised, and the tile done again.
 */

#include "attention.h"

#define VECTORS 2              /* of queries in a panel */
#define LANES (WIDE * VECTORS) /* rows of a panel */
#define STEP 8                 /* keys, or elements of an output, that are multiplied with a panel at a time */
#define TILE 128               /* keys whose values are interleaved at a time; 16 KiB at width 64 */
#define LIMIT 0x1p60f          /* sums above it raise the top */
#define HIDDEN -1e30f          /* a score whose power is 0 */
#define ONES 0x3f803f80u       /* a pair of 1.0 */

/* 2 to the power of x with a relative error of 2^-13.7 at most; bfloat16 rounds by 2^-9. A minimax polynomial of degree
 * 3 on [0, 1), times a power of two. */
INLINE vec exp2_approx(vec x)
{
    const vec whole = rounded_down(x), f = x - whole;
    vec p = fused(f, splat(7.802448878e-02f), splat(2.260675754e-01f));
    p = fused(p, f, splat(6.958331794e-01f));
    p = fused(p, f, splat(9.999252769e-01f));
    return scaled(p, whole);
}

/* What is summed of the rows of an item. */
struct sums {
    float *outputs;     /* [panels, width, LANES] */
    float *tops, *sums; /* [panels, LANES]: score that powers are relative to, and sum of the powers */
};

/* Working memory of one thread. */
struct scratch {
    uint32_t *queries;       /* [panels, width / 2, LANES]: pairs along the width */
    struct sums now, before; /* over a segment, and over those before it */
    int32_t *begins, *ends; /* [panels, LANES]: first position that the row attends to, and one past the last */
    bfloat16 *zeros;    /* [width] */
    uint32_t *values;   /* [TILE / 2, width]: pairs of positions; zeros behind the last */
    uint32_t *powers;   /* [TILE / 2, LANES]: pairs of positions */
    uint32_t *copies;   /* [TILE, width / 2]: keys that do not lie STEP by STEP in pages */
    const uint32_t *keys[TILE / STEP]; /* the first of STEP keys each, in a page or in copies */
};

/* sums[i * n + v] += sum over k < depth of a[i * row + k * step] . b[k * LANES + WIDE * v ...], for i < m and v < n.
 * The arrays have a constant size: with n in it they would stay in memory. */
INLINE void multiply(const int n, const int m, vec sums[16], const uint32_t *a, int64_t row, int64_t step,
                     const uint32_t *b, int64_t depth)
{
    for (int64_t k = 0; k < depth; k++) {
        pairs lanes[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < n; v++)
            lanes[v] = *(const pairs *)(b + k * LANES + v * WIDE);
#pragma GCC unroll 16
        for (int i = 0; i < m; i++) {
            const pairs pair = (pairs){} + a[i * row + k * step];
#pragma GCC unroll 4
            for (int v = 0; v < n; v++)
                sums[i * n + v] = dot(sums[i * n + v], pair, lanes[v]);
        }
    }
}

/* Stores the powers of STEP keys' scores, the first key being at `position`, and adds them to the sums. What is added
 * are the rounded powers, which values are multiplied by: an error that they share cancels out. */
INLINE void store_powers(const int n, const int masked, const vec scores[16], uint32_t *powers, vec scale,
                         const vec *tops, vec *sums, int32_t position, const ivec *begins, const ivec *ends)
{
#pragma GCC unroll 16
    for (int i = 0; i < STEP; i += 2)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) {
            vec low = fused(scores[i * n + v], scale, -tops[v]), high = fused(scores[(i + 1) * n + v], scale, -tops[v]);
            if (masked) {
                low = blend((begins[v] <= position + i) & (ends[v] > position + i), low, splat(HIDDEN));
                high = blend((begins[v] <= position + i + 1) & (ends[v] > position + i + 1), high, splat(HIDDEN));
            }
            const pairs both = narrowed(exp2_approx(low), exp2_approx(high));
            sums[v] = dot(sums[v], both, (pairs){} + ONES);
            *(pairs *)(powers + i / 2 * LANES + v * WIDE) = both;
        }
}

/* Raises the tops of the rows of one vector that are in `which` to their largest score among the tile's first `count`
 * keys, and scales down what they have summed. The other rows stay as they are. */
static __attribute__((noinline, cold)) void raise_tops(struct scratch *own, ivec which, int64_t lane,
                                                       const uint32_t *queries, float *outputs, int64_t width,
                                                       int64_t from, int64_t count, float scale)
{
    const ivec begins = *(ivec *)(own->begins + lane), ends = *(ivec *)(own->ends + lane);
    vec *top = (vec *)(own->now.tops + lane), *sum = (vec *)(own->now.sums + lane), before = *top;
    for (int64_t j = 0; j < count; j += STEP) {
        vec scores[16] = {};
        multiply(1, STEP, scores, own->keys[j / STEP], width / 2, 1, queries, width / 2);
        for (int i = 0; i < STEP; i++) {
            const vec score = scores[i] * scale;
            const int32_t position = (int32_t)(from + j + i);
            *top = blend((score > *top) & (begins <= position) & (ends > position) & which, score, *top);
        }
    }
    const vec keep = blend(*top == before, splat(1), exp2_approx(before - *top));
    *sum *= keep;
    for (int64_t d = 0; d < width; d++)
        *(vec *)(outputs + d * LANES) *= keep;
}

/* Attention of n vectors of a panel to the tile's first `count` keys. masked: some row does not attend to all. */
INLINE void attend_tile(const int n, const int masked, struct scratch *own, int64_t panel, int64_t width, int64_t from,
                        int64_t count, float scale)
{
    const uint32_t *queries = own->queries + panel * (width / 2) * LANES;
    float *outputs = own->now.outputs + panel * width * LANES;
    vec tops[VECTORS], sums[VECTORS];
    ivec begins[VECTORS], ends[VECTORS];
    for (;;) {
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) {
            tops[v] = *(vec *)(own->now.tops + panel * LANES + v * WIDE);
            sums[v] = *(vec *)(own->now.sums + panel * LANES + v * WIDE);
            begins[v] = *(ivec *)(own->begins + panel * LANES + v * WIDE);
            ends[v] = *(ivec *)(own->ends + panel * LANES + v * WIDE);
        }
        for (int64_t j = 0; j < count; j += STEP) {
            vec scores[16] = {};
            multiply(n, STEP, scores, own->keys[j / STEP], width / 2, 1, queries, width / 2);
            store_powers(n, masked, scores, own->powers + j / 2 * LANES, splat(scale), tops, sums, (int32_t)(from + j),
                         begins, ends);
        }
        int again = 0;
#pragma GCC unroll 4
        for (int v = 0; v < n; v++)
            again |= any(sums[v] > LIMIT);
        if (__builtin_expect(!again, 1))
            break;
        for (int v = 0; v < n; v++)
            raise_tops(own, sums[v] > LIMIT, panel * LANES + v * WIDE, queries + v * WIDE, outputs + v * WIDE, width,
                       from, count, scale);
    }
#pragma GCC unroll 4
    for (int v = 0; v < n; v++)
        *(vec *)(own->now.sums + panel * LANES + v * WIDE) = sums[v];
    for (int64_t d = 0; d < width; d += STEP) {
        vec o[16];
#pragma GCC unroll 16
        for (int i = 0; i < STEP * n; i++)
            o[i] = *(vec *)(outputs + (d + i / n) * LANES + i % n * WIDE);
        multiply(n, STEP, o, own->values + d, 1, width, own->powers, (count + 1) / 2);
#pragma GCC unroll 16
        for (int i = 0; i < STEP * n; i++)
            *(vec *)(outputs + (d + i / n) * LANES + i % n * WIDE) = o[i];
    }
}

/* Not inlined: four copies of the loops are enough. */
static __attribute__((noinline)) void attend_panel(int64_t n, int masked, struct scratch *own, int64_t panel,
                                                   int64_t width, int64_t from, int64_t count, float scale)
{
    if (n == 2 && !masked)
        attend_tile(2, 0, own, panel, width, from, count, scale);
    else if (n == 2)
        attend_tile(2, 1, own, panel, width, from, count, scale);
    else if (!masked)
        attend_tile(1, 0, own, panel, width, from, count, scale);
    else
        attend_tile(1, 1, own, panel, width, from, count, scale);
}
