/* Causal attention over the paged pool in float32; keys and values of 16 bits are widened as they are read.
 *
 * A query's result depends on nothing but its request: tiles of keys begin at multiples of TILE, and all sums of a
 * query are made in its own lane, in the order of the positions, segment by segment. */

#include "attention.h"
#include "microkernel.h"

#define TILE 64 /* keys processed at a time; their keys and values stay in the L1 and L2 caches */

/* What is summed of the rows of an item; transposed: panels of LANES rows side by side. */
struct sums {
    float *outputs;       /* [panels, value_width, LANES] */
    float *maxima, *sums; /* [panels, LANES]: running maximum of the scores, and sum of their exponentials */
};

/* Working memory of one thread. */
struct scratch {
    float *queries;           /* [panels, width, LANES] */
    struct sums now, before;  /* over a segment, and over those before it */
    float *keys, *values;     /* [TILE, width]; the same where values are the first elements of their keys */
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
        if (pass->to_value)
            copy_rows(scratch->values + j * width, pass->pool, index + pass->to_value, run * width, pass->dtype);
    }
}

/* Online softmax (arXiv 2205.14135) of one panel of queries over the tile's first `count` keys, which are at positions
 * [from, from + count). ends0, ends1: per lane, one past the last position that the lane's query attends to; masked:
 * some lane does not attend to all of the keys. */
static void attend_tile(const struct pass *pass, struct scratch *scratch, int64_t panel, int64_t from, int64_t count,
                        ivec ends0, ivec ends1, int masked)
{
    const int64_t width = pass->width, value_width = pass->value_width;
    float *scores = scratch->scores, *outputs = scratch->now.outputs + panel * value_width * LANES;
    float *maxima = scratch->now.maxima + panel * LANES, *sums = scratch->now.sums + panel * LANES;
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
    multiply_rows(value_width, outputs, outputs, LANES, keep0, keep1, scratch->values, 1, width, scores, count, NULL);
}

/* The sums of an item of so many lanes, one after the other from here on. */
static struct sums sums_at(float *from, int64_t lanes, int64_t width)
{
    return (struct sums){from, from + lanes * width, from + lanes * (width + 1)};
}

/* Adds the sums of a segment that begins at `from` to those of the segments before it, for the rows that see it. */
static __attribute__((noinline)) void merge_segment(const struct pass *pass, const struct item *item,
                                                    struct sums before, struct sums now, int64_t from)
{
    const int64_t width = pass->value_width, rows = item->count * pass->group;
    for (int64_t lane = 0; lane < rows; lane += WIDE) {
        ivec sees;
        for (int i = 0; i < WIDE; i++)
            sees[i] = end_of(pass, item, lane + i) > from ? -1 : 0;
        const vec max0 = load(before.maxima + lane), max1 = load(now.maxima + lane), max = vec_max(max0, max1);
        const vec keep = blend(sees, exp2_approx(max0 - max), splat(1)), add = exp2_approx(max1 - max);
        store(before.maxima + lane, blend(sees, max, max0));
        const vec sum = load(before.sums + lane);
        store(before.sums + lane, blend(sees, sum * keep + load(now.sums + lane) * add, sum));
        const int64_t first = lane / LANES * width * LANES + lane % LANES;
        for (int64_t d = 0; d < width; d++) {
            float *to = before.outputs + first + d * LANES;
            store(to, blend(sees, load(to) * keep + load(now.outputs + first + d * LANES) * add, load(to)));
        }
    }
}

/* Lays an item's queries side by side. */
static void pack_queries(const struct pass *pass, const struct item *item, const float *query, int64_t query_stride,
                         float scale, struct scratch *scratch)
{
    const int64_t width = pass->width, group = pass->group, rows = item->count * group;
    const int64_t first_row = pass->spans[item->span].row + item->first;
    for (int64_t r = 0; r < (rows + LANES - 1) / LANES * LANES; r++) {
        float *to = scratch->queries + (r / LANES) * width * LANES + r % LANES;
        int64_t source = r < rows ? r : rows - 1; /* lanes without a query repeat the last query */
        const float *from = query + (first_row + source / group) * query_stride;
        from += (item->head * group + source % group) * width;
        for (int64_t d = 0; d < width; d++)
            to[d * LANES] = from[d] * scale;
    }
}

/* Sums over the keys of one segment. */
static void attend_segment(const struct pass *pass, const struct item *item, int64_t layer, int64_t segment,
                           struct scratch *scratch)
{
    const struct span *span = &pass->spans[item->span];
    const int64_t width = pass->value_width, panels = (item->count * pass->group + LANES - 1) / LANES;
    const int64_t last = span->start + item->first + item->count, after = (segment + 1) * pass->segment;
    const int64_t end = after < last ? after : last;

    memset(scratch->now.outputs, 0, panels * width * LANES * sizeof(float));
    memset(scratch->now.sums, 0, panels * LANES * sizeof(float));
    for (int64_t r = 0; r < panels * LANES; r++)
        scratch->now.maxima[r] = -1e30f;
    for (int64_t from = segment * pass->segment; from < end; from += TILE) {
        int64_t count = end - from < TILE ? end - from : TILE;
        gather_tile(pass, span, layer, item->head, from, count, scratch);
        for (int64_t panel = 0; panel < panels; panel++) {
            int32_t ends[LANES];
            for (int64_t lane = 0; lane < LANES; lane++)
                ends[lane] = end_of(pass, item, panel * LANES + lane);
            int64_t visible = ends[LANES - 1] - from < count ? ends[LANES - 1] - from : count;
            if (visible > 0)
                attend_tile(pass, scratch, panel, from, visible, *(ivec *)ends, *(ivec *)(ends + WIDE),
                            from + visible > ends[0]);
        }
    }
}

/* Divides outputs by their sums and stores them row by row. */
static void unpack_outputs(const struct pass *pass, const struct item *item, float *output, struct sums sums)
{
    const int64_t width = pass->value_width, group = pass->group, heads = pass->kv_heads * group;
    const int64_t first_row = pass->spans[item->span].row + item->first;
    for (int64_t r = 0; r < item->count * group; r++) {
        const float *from = sums.outputs + (r / LANES) * width * LANES + r % LANES;
        float *to = output + ((first_row + r / group) * heads + item->head * group + r % group) * width;
        float share = 1.0f / sums.sums[r];
        for (int64_t d = 0; d < width; d++)
            to[d] = from[d * LANES] * share;
    }
}

/* Attention of one work item over all segments, or what it sums over one. */
static void attend_item(const struct pass *pass, const struct item *item, int64_t layer, const float *query,
                        int64_t query_stride, float *output, float scale, struct scratch *scratch, float *partials)
{
    const int64_t end = end_of(pass, item, item->count * pass->group), panel = LANES * (pass->value_width + 2);
    const int whole = item->segment == ALL_SEGMENTS;
    struct scratch first = *scratch;
    first.now = whole ? scratch->before : sums_at(partials + item->partial * panel, LANES, pass->value_width);
    pack_queries(pass, item, query, query_stride, scale, scratch);
    attend_segment(pass, item, layer, whole ? 0 : item->segment, &first);
    if (!whole)
        return;
    for (int64_t segment = 1; segment * pass->segment < end; segment++) {
        attend_segment(pass, item, layer, segment, scratch);
        merge_segment(pass, item, scratch->before, scratch->now, segment * pass->segment);
    }
    unpack_outputs(pass, item, output, scratch->before);
}

/* Merges what was summed over the segments of an item. */
static void merge_item(const struct pass *pass, const struct item *item, float *output, float *partials)
{
    const int64_t panel = LANES * (pass->value_width + 2), width = pass->value_width;
    const struct sums all = sums_at(partials + item->partial * panel, LANES, width);
    for (int64_t segment = 1; segment < item->segment; segment++)
        merge_segment(pass, item, all, sums_at(partials + (item->partial + segment) * panel, LANES, width),
                      segment * pass->segment);
    unpack_outputs(pass, item, output, all);
}

/* Causal attention of all work items over what the pool holds of each request: the keys and values of the pass itself
 * have been written there, too. query: [tokens, heads, width], rows query_stride elements apart; output: [tokens,
 * heads, value_width], dense; both float32. scale: of the scores, times log2(e). Returns -1 when memory ran out, else 0. */
int EXPORT(attend_float32)(const struct pass *pass, int64_t layer, const float *query, int64_t query_stride,
                            float *output, float scale)
{
    const int64_t width = pass->width, value_width = pass->value_width;
    const int64_t lanes = (pass->most_tokens * pass->group + LANES - 1) / LANES * LANES;
    int64_t bytes = (lanes * (width + 2 * value_width + 4) + TILE * (2 * width + LANES)) * sizeof(float);
    char *memory = new_scratch(&bytes, pass->partial_count * LANES * (value_width + 2) * sizeof(float));
    if (!memory)
        return -1;
    float *partials = (float *)(memory + bytes * omp_get_max_threads());
#pragma omp parallel
    {
        struct scratch scratch;
        scratch.queries = (float *)(memory + omp_get_thread_num() * bytes);
        scratch.now = sums_at(scratch.queries + lanes * width, lanes, value_width);
        scratch.before = sums_at(scratch.now.outputs + lanes * (value_width + 2), lanes, value_width);
        scratch.keys = scratch.before.outputs + lanes * (value_width + 2);
        scratch.scores = scratch.keys + TILE * width;
        scratch.values = pass->to_value ? scratch.scores + TILE * LANES : scratch.keys;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++)
            attend_item(pass, &pass->items[i], layer, query, query_stride, output, scale, &scratch, partials);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->merge_count; i++)
            merge_item(pass, &pass->merges[i], output, partials);
    }
    free(memory);
    return 0;
}
