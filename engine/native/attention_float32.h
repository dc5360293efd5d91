/* Causal attention over the paged pool in float32; keys and values of 16 bits are widened as they are read.
 *
 * A query's result depends on nothing but its request: tiles of keys begin at multiples of TILE, and all sums of a
 * query are made in its own lane, in the order of the positions, segment by segment. */

#ifndef HEADRACE_ATTENTION_FLOAT32_H
#define HEADRACE_ATTENTION_FLOAT32_H

#include "attention.h"
#include "microkernel.h"

#define TILE 64 /* keys processed at a time; their keys and values stay in the L1 and L2 caches */

/* What is summed of the rows of an item; transposed: panels of LANES rows side by side. */
struct sums {
    float *outputs;       /* [panels, value_width, LANES] */
    float *maxima, *sums; /* [panels, LANES]: running maximum of the scores, and sum of their exponentials */
};

/* The positions that the lanes of a vector attend to. */
struct ranges {
    ivec begins, ends;
};

/* Working memory of one thread. */
struct scratch {
    struct ranges *ranges;    /* [panels, 2]: of an item's rows */
    float *queries;           /* [panels, width, LANES] */
    struct sums now, before;  /* over a segment, and over those before it */
    float *keys, *values;     /* [TILE, width of them]; the same where values are the first elements of their keys */
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

/* Copies keys and values of positions [from, from + count) to scratch; zeros in place of those before `first`, which
 * nobody attends to. */
static void gather_tile(const struct pass *pass, const struct span *span, int64_t layer, int64_t head, int64_t from,
                        int64_t count, int64_t first, struct scratch *scratch)
{
    const int64_t width = pass->keys.width, value_width = pass->values.width, unseen = first > from ? first - from : 0;
    memset(scratch->keys, 0, unseen * width * sizeof(float));
    if (pass->values.memory)
        memset(scratch->values, 0, unseen * value_width * sizeof(float));
    for (int64_t j = unseen, run; j < count; j += run) {
        run = run_length(pass, from + j, count - j);
        copy_rows(scratch->keys + j * width, pass->keys.memory,
                  row_index(pass, &pass->keys, span, layer, head, from + j), run * width, pass->dtype);
        if (pass->values.memory)
            copy_rows(scratch->values + j * value_width, pass->values.memory,
                      row_index(pass, &pass->values, span, layer, head, from + j), run * value_width, pass->dtype);
    }
}

/* The scores of a softmax that is capped: cap * tanh(s / cap). */
INLINE vec capped(vec s, float cap)
{
    return cap * (1.0f - 2.0f / (1.0f + exp2_approx(vec_min(s * (2.8853900817779268f / cap), splat(128)))));
}

INLINE ivec sees(const struct ranges *ranges, ivec position)
{
    return (position >= ranges->begins) & (position < ranges->ends);
}

/* Online softmax (arXiv 2205.14135) of one panel of queries over the tile's first `count` keys, which are at positions
 * [from, from + count). ranges: of both vectors; masked: some lane does not attend to all of the keys. A tile that a
 * lane does not see leaves what it has summed as it is, to the bit. */
static void attend_tile(const struct pass *pass, const struct scoring *scoring, struct scratch *scratch, int64_t panel,
                        int64_t from, int64_t count, const struct ranges ranges[2], int masked)
{
    const int64_t width = pass->keys.width, value_width = pass->values.width;
    const int64_t value_stride = pass->values.memory ? value_width : width;
    float *scores = scratch->scores, *outputs = scratch->now.outputs + panel * value_width * LANES;
    float *maxima = scratch->now.maxima + panel * LANES, *sums = scratch->now.sums + panel * LANES;
    multiply_rows(count, scores, NULL, LANES, splat(0), splat(0), scratch->keys, width, 1,
                  scratch->queries + panel * width * LANES, width, NULL);

    const vec no_score = splat(-1e30f);
    vec max0 = load(maxima), max1 = load(maxima + WIDE), old_max0 = max0, old_max1 = max1;
    for (int64_t j = 0; j < count; j++) {
        vec s0 = load(scores + j * LANES), s1 = load(scores + j * LANES + WIDE);
        if (scoring->cap) {
            s0 = capped(s0, scoring->cap);
            s1 = capped(s1, scoring->cap);
        }
        if (masked) {
            ivec position = (ivec){0} + (int32_t)(from + j);
            s0 = blend(sees(ranges, position), s0, no_score);
            s1 = blend(sees(ranges + 1, position), s1, no_score);
        }
        if (masked || scoring->cap) {
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
        if (masked && pass->begins) { /* a lane that has seen nothing yet has no maximum to be far below */
            ivec position = (ivec){0} + (int32_t)(from + j);
            p0 = blend(sees(ranges, position), p0, splat(0));
            p1 = blend(sees(ranges + 1, position), p1, splat(0));
        }
        store(scores + j * LANES, p0);
        store(scores + j * LANES + WIDE, p1);
        sum0 += p0;
        sum1 += p1;
    }
    store(maxima, max0);
    store(maxima + WIDE, max1);
    store(sums, sum0);
    store(sums + WIDE, sum1);
    multiply_rows(value_width, outputs, outputs, LANES, keep0, keep1, scratch->values, 1, value_stride, scores, count,
                  NULL);
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
    const int64_t width = pass->values.width, rows = item->count * pass->group;
    for (int64_t lane = 0; lane < rows; lane += WIDE) {
        ivec sees;
        for (int i = 0; i < WIDE; i++)
            sees[i] = sees_segment(pass, item, lane + i, from) ? -1 : 0;
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

/* Lays an item's queries side by side. query: of its first token and head. */
static void pack_queries(const struct pass *pass, const struct item *item, const float *query, int64_t query_stride,
                         float scale, struct scratch *scratch)
{
    const int64_t width = pass->keys.width, group = pass->group, rows = item->count * group;
    for (int64_t r = 0; r < (rows + LANES - 1) / LANES * LANES; r++) {
        float *to = scratch->queries + (r / LANES) * width * LANES + r % LANES;
        int64_t source = r < rows ? r : rows - 1; /* lanes without a query repeat the last query */
        const float *from = query + source / group * query_stride + source % group * width;
        for (int64_t d = 0; d < width; d++)
            to[d * LANES] = from[d] * scale;
    }
}

/* Sums over the keys of one segment. */
static void attend_segment(const struct pass *pass, const struct scoring *scoring, const struct item *item,
                           int64_t layer, int64_t segment, struct scratch *scratch)
{
    const struct span *span = &pass->spans[item->span];
    const int64_t width = pass->values.width, panels = (item->count * pass->group + LANES - 1) / LANES;
    const int64_t end = least((segment + 1) * pass->segment, end_of(pass, item, item->count * pass->group));
    const int64_t begin = begin_of(pass, item, 0);

    memset(scratch->now.outputs, 0, panels * width * LANES * sizeof(float));
    memset(scratch->now.sums, 0, panels * LANES * sizeof(float));
    for (int64_t r = 0; r < panels * LANES; r++)
        scratch->now.maxima[r] = -1e30f;
    for (int64_t from = segment * pass->segment; from < end; from += TILE) {
        const int64_t count = least(end - from, TILE);
        if (from + count <= begin)
            continue;
        gather_tile(pass, span, layer, item->head, from, count, begin, scratch);
        for (int64_t panel = 0, ahead = from + TILE, part; panel < panels; panel++, ahead = part) {
            part = least(end, from + TILE + (panel + 1) * TILE / panels); /* of the next tile */
            prefetch_rows(pass, span, layer, item->head, ahead, part, item_bytes(pass->dtype));
            const struct ranges *ranges = scratch->ranges + panel * 2;
            const int32_t first_end = ranges[0].ends[0], last_end = ranges[1].ends[WIDE - 1];
            const int64_t visible = least(last_end - from, count);
            if (visible > 0 && ranges[0].begins[0] < from + visible)
                attend_tile(pass, scoring, scratch, panel, from, visible, ranges,
                            from + visible > first_end || ranges[1].begins[WIDE - 1] > from);
        }
    }
}

/* Divides outputs by their sums and stores them row by row. output: of the item's first token and head; tokens are
 * `stride` elements apart. */
static void unpack_outputs(const struct pass *pass, const struct scoring *scoring, const struct item *item,
                           float *output, int64_t stride, struct sums sums)
{
    const int64_t width = pass->values.width, group = pass->group;
    for (int64_t r = 0; r < item->count * group; r++) {
        const float *from = sums.outputs + (r / LANES) * width * LANES + r % LANES;
        float *to = output + r / group * stride + r % group * width;
        float sum = sums.sums[r];
        if (scoring->sinks)
            sum += exp2_approx(splat(scoring->sinks[item->head * group + r % group] - sums.maxima[r]))[0];
        float share = 1.0f / sum;
        for (int64_t d = 0; d < width; d++)
            to[d] = from[d * LANES] * share;
    }
}

/* Attention of one work item over all segments, or what it sums over one. query, output: of its first token and head. */
static void attend_item(const struct pass *pass, const struct scoring *scoring, const struct item *item,
                        int64_t layer, const float *query, int64_t query_stride, float *output, int64_t stride,
                        struct scratch *scratch, float *partials)
{
    const int64_t end = end_of(pass, item, item->count * pass->group), panel = LANES * (pass->values.width + 2);
    const int whole = item->segment == ALL_SEGMENTS;
    struct scratch first = *scratch;
    first.now = whole ? scratch->before : sums_at(partials + item->partial * panel, LANES, pass->values.width);
    for (int64_t r = 0; r < (item->count * pass->group + LANES - 1) / LANES * LANES; r++) {
        scratch->ranges[r / WIDE].begins[r % WIDE] = begin_of(pass, item, r);
        scratch->ranges[r / WIDE].ends[r % WIDE] = end_of(pass, item, r);
    }
    pack_queries(pass, item, query, query_stride, scoring->scale, scratch);
    int64_t segment = whole ? begin_of(pass, item, 0) / pass->segment : item->segment;
    attend_segment(pass, scoring, item, layer, segment, &first);
    if (!whole)
        return;
    while (++segment * pass->segment < end) {
        attend_segment(pass, scoring, item, layer, segment, scratch);
        merge_segment(pass, item, scratch->before, scratch->now, segment * pass->segment);
    }
    unpack_outputs(pass, scoring, item, output, stride, scratch->before);
}

/* Merges what was summed over the segments of an item. output: of its first token and head. */
static void merge_item(const struct pass *pass, const struct scoring *scoring, const struct item *item, float *output,
                       int64_t stride, float *partials)
{
    const int64_t width = pass->values.width, panel = LANES * (width + 2);
    const int64_t first = begin_of(pass, item, 0) / pass->segment;
    float *of = partials + item->partial * panel;
    const struct sums all = sums_at(of, LANES, width);
    for (int64_t segment = first + 1; segment < item->segment; segment++)
        merge_segment(pass, item, all, sums_at(of + (segment - first) * panel, LANES, width), segment * pass->segment);
    unpack_outputs(pass, scoring, item, output, stride, all);
}

/* Elements of a batch's queries, or of its outputs, before the first token and head of an item; a token has `stride`, a
 * head `width`. */
static int64_t before_item(const struct pass *pass, const struct item *item, int64_t stride, int64_t width)
{
    return (pass->spans[item->span].row + item->first) * stride + item->head * pass->group * width;
}

/* Lanes of an item of so many tokens. */
static int64_t lanes_of(const struct pass *pass, int64_t tokens)
{
    return (tokens * pass->group + LANES - 1) / LANES * LANES;
}

/* Bytes of working memory for items of so many tokens. */
static int64_t attend_bytes(const struct pass *pass, int64_t tokens)
{
    const int64_t width = pass->keys.width, value_width = pass->values.width, lanes = lanes_of(pass, tokens);
    return (lanes * (width + 2 * value_width + 6) + TILE * (width + value_width + LANES)) * sizeof(float);
}

/* Bytes of the sums of all items over one segment. */
static int64_t partial_bytes(const struct pass *pass)
{
    return pass->partial_count * LANES * (pass->values.width + 2) * sizeof(float);
}

static struct scratch scratch_at(const struct pass *pass, int64_t tokens, char *memory)
{
    const int64_t width = pass->keys.width, value_width = pass->values.width, lanes = lanes_of(pass, tokens);
    struct scratch scratch;
    scratch.ranges = (struct ranges *)memory;
    scratch.queries = (float *)(scratch.ranges + lanes / WIDE);
    scratch.now = sums_at(scratch.queries + lanes * width, lanes, value_width);
    scratch.before = sums_at(scratch.now.outputs + lanes * (value_width + 2), lanes, value_width);
    scratch.keys = scratch.before.outputs + lanes * (value_width + 2);
    scratch.scores = scratch.keys + TILE * width;
    scratch.values = pass->values.memory ? scratch.scores + TILE * LANES : scratch.keys;
    return scratch;
}

/* Attention of all work items over what the pool holds of each request: the keys and values of the pass itself have been
 * written there, too. query: [tokens, heads, width], rows query_stride elements apart; output: [tokens, heads, width of
 * values], dense; both float32. Returns -1 when memory ran out, else 0. */
int EXPORT(attend_float32)(const struct pass *pass, int64_t layer, const float *query, int64_t query_stride,
                            float *output, const struct scoring *scoring)
{
    const int64_t width = pass->keys.width, value_width = pass->values.width;
    const int64_t stride = pass->kv_heads * pass->group * value_width;
    int64_t bytes = attend_bytes(pass, pass->most_tokens);
    char *memory = new_scratch(&bytes, partial_bytes(pass));
    if (!memory)
        return -1;
    float *partials = (float *)(memory + bytes * omp_get_max_threads());
#pragma omp parallel
    {
        struct scratch scratch = scratch_at(pass, pass->most_tokens, memory + omp_get_thread_num() * bytes);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++) {
            const struct item *item = &pass->items[i];
            attend_item(pass, scoring, item, layer, query + before_item(pass, item, query_stride, width), query_stride,
                        output + before_item(pass, item, stride, value_width), stride, &scratch, partials);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->merge_count; i++) {
            const struct item *merge = &pass->merges[i];
            merge_item(pass, scoring, merge, output + before_item(pass, merge, stride, value_width), stride, partials);
        }
    }
    free(memory);
    return 0;
}

#endif
