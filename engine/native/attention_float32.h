/* Causal attention over the paged pool in float32; keys and values of 16 bits are widened as they are read.
 *
 * A query's result depends on nothing but its request: tiles of keys begin at multiples of TILE, and all sums of a
 * query are made in its own lane, in the order of the positions. */

#include "attention.h"
#include "microkernel.h"

#define TILE 64 /* keys processed at a time; their keys and values stay in the L1 and L2 caches */

/* Working memory of one thread. Queries and outputs are transposed: panels of LANES rows side by side. */
struct scratch {
    float *queries, *outputs; /* [panels, width, LANES] */
    float *maxima, *sums;     /* [panels, LANES]: running maximum of the scores, and sum of their exponentials */
    float *keys, *values;     /* [TILE, width] */
    float *scores;            /* [TILE, LANES] */
};

INLINE void widen(float *to, const void *from, int64_t elements, int dtype)
{
    BY_VECTORS(elements, store_part(to, i, n, load_part(from, i, n, dtype), FLOAT32));
}

INLINE void copy_rows(float *to, const void *pool, int64_t offset, int64_t elements, int64_t dtype)
{
    if (dtype == FLOAT32)
        memcpy(to, at(pool, offset, FLOAT32), elements * sizeof(float));
    else if (dtype == BFLOAT16)
        widen(to, at(pool, offset, BFLOAT16), elements, BFLOAT16);
    else
        widen(to, at(pool, offset, FLOAT16), elements, FLOAT16);
}

/* Copies keys and values of positions [from, from + count) to scratch. */
static void gather_tile(const struct pass *pass, const struct span *span, int64_t layer, int64_t head, int64_t from,
                        int64_t count, struct scratch *scratch)
{
    const int64_t width = pass->width;
    for (int64_t j = 0, run; j < count; j += run) {
        run = run_length(pass, from + j, count - j);
        const int64_t index = key_index(pass, span, layer, head, from + j);
        copy_rows(scratch->keys + j * width, pass->pool, index, run * width, pass->dtype);
        copy_rows(scratch->values + j * width, pass->pool, index + to_value(pass), run * width, pass->dtype);
    }
}

/* Online softmax (arXiv 2205.14135) of one panel of queries over the tile's first `count` keys, which are at positions
 * [from, from + count). ends0, ends1: per lane, one past the last position that the lane's query attends to; masked:
 * some lane does not attend to all of the keys. */
static void attend_tile(const struct pass *pass, struct scratch *scratch, int64_t panel, int64_t from, int64_t count,
                        ivec ends0, ivec ends1, int masked)
{
    const int64_t width = pass->width;
    float *scores = scratch->scores, *maxima = scratch->maxima + panel * LANES, *sums = scratch->sums + panel * LANES;
    float *outputs = scratch->outputs + panel * width * LANES;
    multiply_rows(count, scores, NULL, LANES, splat(0), splat(0), scratch->keys, width, 1,
                  scratch->queries + panel * width * LANES, width, NULL);

    const vec no_score = splat(-1e30f);
    vec max0 = load(maxima), max1 = load(maxima + WIDE), old_max0 = max0, old_max1 = max1;
    for (int64_t j = 0; j < count; j++) {
        vec s0 = load(scores + j * LANES), s1 = load(scores + j * LANES + WIDE);
        if (masked) {
            ivec position = (ivec){0} + (int32_t)(from + j);
            s0 = blend(position < ends0, s0, no_score);
            s1 = blend(position < ends1, s1, no_score);
            store(scores + j * LANES, s0);
            store(scores + j * LANES + WIDE, s1);
        }
        max0 = vec_max(s0, max0); /* never NaN: a NaN score gives a NaN weight below, and so a NaN output */
        max1 = vec_max(s1, max1);
    }
    vec keep0 = exp2_approx(old_max0 - max0), keep1 = exp2_approx(old_max1 - max1);
    vec sum0 = load(sums) * keep0, sum1 = load(sums + WIDE) * keep1;
    for (int64_t j = 0; j < count; j++) {
        vec p0 = exp2_approx(load(scores + j * LANES) - max0), p1 = exp2_approx(load(scores + j * LANES + WIDE) - max1);
        store(scores + j * LANES, p0);
        store(scores + j * LANES + WIDE, p1);
        sum0 += p0;
        sum1 += p1;
    }
    store(maxima, max0);
    store(maxima + WIDE, max1);
    store(sums, sum0);
    store(sums + WIDE, sum1);
    multiply_rows(width, outputs, outputs, LANES, keep0, keep1, scratch->values, 1, width, scores, count, NULL);
}

/* Attention of one work item: packs its queries, visits all tiles of keys, writes normalised outputs. */
static void attend_item(const struct pass *pass, const struct item *item, int64_t layer, const float *query,
                        int64_t query_stride, float *output, float scale, struct scratch *scratch)
{
    const struct span *span = &pass->spans[item->span];
    const int64_t width = pass->width, group = pass->group, rows = item->count * group;
    const int64_t panels = (rows + LANES - 1) / LANES, first_row = span->row + item->first;
    const int64_t end = span->start + item->first + item->count, heads = pass->kv_heads * group;

    memset(scratch->outputs, 0, panels * width * LANES * sizeof(float));
    memset(scratch->sums, 0, panels * LANES * sizeof(float));
    for (int64_t r = 0; r < panels * LANES; r++) {
        float *to = scratch->queries + (r / LANES) * width * LANES + r % LANES;
        int64_t source = r < rows ? r : rows - 1; /* lanes without a query repeat the last query */
        const float *from = query + (first_row + source / group) * query_stride;
        from += (item->head * group + source % group) * width;
        for (int64_t d = 0; d < width; d++)
            to[d * LANES] = from[d] * scale;
        scratch->maxima[r] = -1e30f;
    }
    for (int64_t from = 0; from < end; from += TILE) {
        int64_t count = end - from < TILE ? end - from : TILE;
        gather_tile(pass, span, layer, item->head, from, count, scratch);
        for (int64_t panel = 0; panel < panels; panel++) {
            int32_t ends[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t r = panel * LANES + lane < rows ? panel * LANES + lane : rows - 1;
                ends[lane] = (int32_t)(span->start + item->first + r / group + 1);
            }
            int64_t visible = ends[LANES - 1] - from < count ? ends[LANES - 1] - from : count;
            if (visible > 0)
                attend_tile(pass, scratch, panel, from, visible, *(ivec *)ends, *(ivec *)(ends + WIDE),
                            from + visible > ends[0]);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *from = scratch->outputs + (r / LANES) * width * LANES + r % LANES;
        float *to = output + ((first_row + r / group) * heads + item->head * group + r % group) * width;
        float share = 1.0f / scratch->sums[r];
        for (int64_t d = 0; d < width; d++)
            to[d] = from[d * LANES] * share;
    }
}

/* Causal attention of all work items over what the pool holds of each request: the keys and values of the pass itself
 * have been written there, too. query: [tokens, heads, width], rows query_stride elements apart; output: [tokens,
 * heads, width], dense; both float32. scale: of the scores, times log2(e). Returns -1 when memory ran out, else 0. */
int EXPORT(attend_float32)(const struct pass *pass, int64_t layer, const float *query, int64_t query_stride,
                            float *output, float scale)
{
    const int64_t width = pass->width, lanes = (pass->most_tokens * pass->group + LANES - 1) / LANES * LANES;
    int64_t bytes = (lanes * (2 * width + 2) + TILE * (2 * width + LANES)) * sizeof(float);
    char *memory = new_scratch(&bytes);
    if (!memory)
        return -1;
#pragma omp parallel
    {
        struct scratch scratch;
        scratch.queries = (float *)(memory + omp_get_thread_num() * bytes);
        scratch.outputs = scratch.queries + lanes * width;
        scratch.keys = scratch.outputs + lanes * width;
        scratch.values = scratch.keys + TILE * width;
        scratch.scores = scratch.values + TILE * width;
        scratch.maxima = scratch.scores + TILE * LANES;
        scratch.sums = scratch.maxima + lanes;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++)
            attend_item(pass, &pass->items[i], layer, query, query_stride, output, scale, &scratch);
    }
    free(memory);
    return 0;
}
