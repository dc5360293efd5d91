/* Causal attention over the paged pool in bfloat16: flash attention (arXiv 2205.14135) with queries side by side.
 *
 * Rows are queries: the `group` query heads of one KV head, token by token. A panel has LANES rows, and each row a lane
 * of a vector for all that belongs to it: scores, powers, sum and output. Nothing is ever added up across lanes, and
 * tiles of keys begin at multiples of TILE, segments of them are merged in order. So a row's result depends on its
 * request alone, to the bit: not on the chunk, the batch, the thread or the lane that it is computed in.
 *
 * A panel's attention to a tile is in bfloat16_panel.h.
 *
 * Included once for the instructions and once for their emulation, which define EXPORT and
 *     dot(sum, a, b)          sum + the dot products of pairs
 *     fused(a, b, c)          a * b + c with one rounding
 *     rounded_down(x), scaled(p, exponent), any(which)
 *     narrowed(low, high)     pairs of bfloat16, rounded to nearest even
 */

#include "bfloat16_panel.h"

/* Finds the keys of positions [from, from + count) and interleaves their values, with zeros in place of those before
 * `first`. Keys are read STEP by STEP, so the last may be of slots that are not written yet; no row attends to those. */
static void prepare_tile(const struct pass *pass, const struct span *span, int64_t layer, int64_t head, int64_t from,
                         int64_t count, int64_t first, struct scratch *own)
{
    const bfloat16 *values[TILE + 1];
    const int64_t width = pass->keys.width, in_place = pass->page_size % STEP == 0;
    for (int64_t j = 0, run; j < count; j += run) {
        run = run_length(pass, from + j, count - j);
        const bfloat16 *keys = pass->keys.memory, *of = pass->values.memory;
        keys += row_index(pass, &pass->keys, span, layer, head, from + j);
        of += row_index(pass, &pass->values, span, layer, head, from + j);
        for (int64_t i = 0; i < run; i++)
            values[j + i] = from + j + i < first ? own->zeros : of + i * width;
        for (int64_t i = 0; i < run && in_place; i += STEP)
            own->keys[(j + i) / STEP] = (const uint32_t *)(keys + i * width);
        if (!in_place)
            memcpy(own->copies + j * (width / 2), keys, run * width * sizeof(bfloat16));
    }
    if (!in_place) {
        memset(own->copies + count * (width / 2), 0, (TILE - count) * width * sizeof(bfloat16));
        for (int64_t j = 0; j < count; j += STEP)
            own->keys[j / STEP] = own->copies + j * (width / 2);
    }
    values[count] = NULL;
    for (int64_t j = 0; j < count; j += 2)
        interleave_rows(own->values + j / 2 * width, values[j], values[j + 1], width);
}

/* Lays queries side by side; lanes without a query repeat the last one. query: of the item's first token and head. */
static void pack_queries(const struct pass *pass, int64_t rows, const bfloat16 *query, int64_t query_stride,
                         struct scratch *own)
{
    const int64_t width = pass->keys.width, group = pass->group;
    for (int64_t v = 0; v < (rows + WIDE - 1) / WIDE; v++) {
        uint32_t *to = own->queries + v / VECTORS * (width / 2) * LANES + v % VECTORS * WIDE;
        for (int64_t d = 0; d < width; d += 32) {
            pairs r[WIDE];
            for (int i = 0; i < WIDE; i++) {
                const int64_t row = least(v * WIDE + i, rows - 1);
                r[i] = load_row(query + row / group * query_stride + row % group * width, d, width);
            }
            transpose(r);
            for (int i = 0; i < WIDE && d + 2 * i < width; i++)
                *(pairs *)(to + (d / 2 + i) * LANES) = r[i];
        }
    }
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
    const int64_t width = pass->keys.width, rows = item->count * pass->group;
    for (int64_t lane = 0; lane < rows; lane += WIDE) {
        ivec sees;
        for (int i = 0; i < WIDE; i++)
            sees[i] = sees_segment(pass, item, lane + i, from) ? -1 : 0;
        vec *top = (vec *)(before.tops + lane), *sum = (vec *)(before.sums + lane);
        const vec other = *(vec *)(now.tops + lane), higher = blend((other > *top) & sees, other, *top);
        const vec keep = blend(higher == *top, splat(1), exp2_approx(*top - higher));
        const vec add = blend(higher == other, splat(1), exp2_approx(other - higher));
        *top = higher;
        *sum = blend(sees, fused(*sum, keep, *(vec *)(now.sums + lane) * add), *sum);
        const int64_t first = lane / LANES * width * LANES + lane % LANES;
        for (int64_t d = 0; d < width; d++) {
            vec *to = (vec *)(before.outputs + first + d * LANES);
            *to = blend(sees, fused(*to, keep, *(vec *)(now.outputs + first + d * LANES) * add), *to);
        }
    }
}

/* Divides outputs by their sums and stores them row by row. sinks: NULL, or of the item's first head. output: of its first
 * token and head; tokens are `stride` elements apart. */
static void unpack_outputs(const struct pass *pass, int64_t rows, const float *sinks, bfloat16 *output, int64_t stride,
                           struct sums all)
{
    const int64_t width = pass->keys.width, group = pass->group;
    for (int64_t v = 0; v < (rows + WIDE - 1) / WIDE; v++) {
        const float *from = all.outputs + v / VECTORS * width * LANES + v % VECTORS * WIDE;
        vec sum = *(vec *)(all.sums + v * WIDE);
        if (sinks) {
            vec sink;
            for (int i = 0; i < WIDE; i++)
                sink[i] = sinks[(v * WIDE + i) % group];
            sum += exp2_approx(sink - *(vec *)(all.tops + v * WIDE));
        }
        const vec share = 1.0f / sum;
        for (int64_t d = 0; d < width; d += 32) {
            const int64_t here = least(width - d, 32);
            pairs r[WIDE] = {};
            for (int64_t i = 0; i < here / 2; i++) {
                const float *part = from + (d + 2 * i) * LANES;
                r[i] = narrowed(*(const vec *)part * share, *(const vec *)(part + LANES) * share);
            }
            transpose(r);
            for (int64_t i = 0; i < WIDE && v * WIDE + i < rows; i++) {
                const int64_t row = v * WIDE + i;
                memcpy(output + row / group * stride + row % group * width + d, &r[i], here * sizeof(bfloat16));
            }
        }
    }
}

/* Those of an item's heads, or NULL. */
static inline const float *sinks_of(const struct pass *pass, const struct scoring *scoring, const struct item *item)
{
    return scoring->sinks ? scoring->sinks + item->head * pass->group : NULL;
}

/* Sums over the keys of one segment. */
static void attend_segment(const struct pass *pass, const struct item *item, int64_t layer, int64_t segment,
                           float scale, struct scratch *own)
{
    const struct span *span = &pass->spans[item->span];
    const int64_t width = pass->keys.width, vectors = (item->count * pass->group + WIDE - 1) / WIDE;
    const int64_t panels = (vectors + VECTORS - 1) / VECTORS, after = (segment + 1) * pass->segment;
    const int64_t end = least(after, own->ends[vectors * WIDE - 1]), begin = own->begins[0];

    memset(own->now.outputs, 0, panels * width * LANES * sizeof(float));
    memset(own->now.sums, 0, panels * LANES * sizeof(float));
    for (int64_t v = 0; v < vectors; v++) {
        const uint32_t *queries = own->queries + v / VECTORS * (width / 2) * LANES + v % VECTORS * WIDE;
        const int32_t *begins = own->begins + v * WIDE;
        for (int i = 0; i < WIDE; i++)
            if (i == 0 || begins[i] != begins[i - 1]) {
                const bfloat16 *key = pass->keys.memory;
                key += row_index(pass, &pass->keys, span, layer, item->head, begins[i]);
                vec top[16] = {}, *tops = (vec *)(own->now.tops + v * WIDE);
                multiply(1, 1, top, (const uint32_t *)key, width / 2, 1, queries, width / 2);
                *tops = blend(*(const ivec *)begins == begins[i], top[0] * scale, *tops);
            }
    }
    for (int64_t from = segment * pass->segment; from < end; from += TILE) {
        const int64_t count = least(end - from, TILE);
        if (from + count <= begin)
            continue;
        prepare_tile(pass, span, layer, item->head, from, count, begin, own);
        for (int64_t panel = 0, ahead = from + TILE, part; panel < panels; panel++, ahead = part) {
            part = least(end, from + TILE + (panel + 1) * TILE / panels); /* of the next tile */
            prefetch_rows(pass, span, layer, item->head, ahead, part, sizeof(bfloat16));
            const int32_t *ends = own->ends + panel * LANES, *begins = own->begins + panel * LANES;
            const int64_t seen = least(ends[LANES - 1] - from, count);
            const int64_t n = least(vectors - panel * VECTORS, VECTORS);
            const int masked = from + (seen + STEP - 1) / STEP * STEP > ends[0] || begins[LANES - 1] > from;
            if (seen > 0 && begins[0] < from + seen)
                attend_panel(n, masked, own, panel, width, from, seen, scale);
        }
    }
}

/* Attention of one work item over all segments, or what it sums over one. query, output: of its first token and head. */
static void attend_item(const struct pass *pass, const struct scoring *scoring, const struct item *item, int64_t layer,
                        const bfloat16 *query, int64_t query_stride, bfloat16 *output, int64_t stride,
                        struct scratch *own, float *partials)
{
    const int64_t rows = item->count * pass->group, end = end_of(pass, item, rows);
    const int64_t panel = LANES * (pass->keys.width + 2);
    const int whole = item->segment == ALL_SEGMENTS;
    struct scratch first = *own;
    first.now = whole ? own->before : sums_at(partials + item->partial * panel, LANES, pass->keys.width);
    for (int64_t r = 0; r < (rows + LANES - 1) / LANES * LANES; r++) {
        own->begins[r] = begin_of(pass, item, r);
        own->ends[r] = end_of(pass, item, r);
    }
    pack_queries(pass, rows, query, query_stride, own);
    int64_t segment = whole ? own->begins[0] / pass->segment : item->segment;
    attend_segment(pass, item, layer, segment, scoring->scale, &first);
    if (!whole)
        return;
    while (++segment * pass->segment < end) {
        attend_segment(pass, item, layer, segment, scoring->scale, own);
        merge_segment(pass, item, own->before, own->now, segment * pass->segment);
    }
    unpack_outputs(pass, rows, sinks_of(pass, scoring, item), output, stride, own->before);
}

/* Merges what was summed over the segments of an item. output: of its first token and head. */
static void merge_item(const struct pass *pass, const struct scoring *scoring, const struct item *item,
                       bfloat16 *output, int64_t stride, float *partials)
{
    const int64_t width = pass->keys.width, panel = LANES * (width + 2);
    const int64_t first = begin_of(pass, item, 0) / pass->segment;
    float *of = partials + item->partial * panel;
    const struct sums all = sums_at(of, LANES, width);
    for (int64_t segment = first + 1; segment < item->segment; segment++)
        merge_segment(pass, item, all, sums_at(of + (segment - first) * panel, LANES, width), segment * pass->segment);
    unpack_outputs(pass, item->count * pass->group, sinks_of(pass, scoring, item), output, stride, all);
}

/* Elements of a batch's queries, or of its outputs, before the first token and head of an item; a token has `stride`. */
static int64_t before_item(const struct pass *pass, const struct item *item, int64_t stride)
{
    return (pass->spans[item->span].row + item->first) * stride + item->head * pass->group * pass->keys.width;
}

/* Lanes of an item of so many tokens. */
static int64_t lanes_of(const struct pass *pass, int64_t tokens)
{
    return (tokens * pass->group + LANES - 1) / LANES * LANES;
}

/* Elements of copied keys, which are needed where they do not lie STEP by STEP in pages. */
static int64_t copied(const struct pass *pass)
{
    return pass->page_size % STEP ? TILE * (pass->keys.width / 2) : 0;
}

/* Bytes of working memory for items of so many tokens. */
int64_t EXPORT(attend_bytes)(const struct pass *pass, int64_t tokens)
{
    const int64_t width = pass->keys.width, lanes = lanes_of(pass, tokens);
    return (lanes * (width / 2 + 2 * width + 6) + TILE / 2 * (width + LANES) + copied(pass) + width / 2) * sizeof(float);
}

/* Bytes of the sums of all items over one segment. */
int64_t EXPORT(partial_bytes)(const struct pass *pass)
{
    return pass->partial_count * LANES * (pass->keys.width + 2) * sizeof(float);
}

static struct scratch scratch_at(const struct pass *pass, int64_t tokens, char *memory)
{
    const int64_t width = pass->keys.width, lanes = lanes_of(pass, tokens);
    struct scratch own;
    own.now = sums_at((float *)memory, lanes, width);
    own.before = sums_at(own.now.outputs + lanes * (width + 2), lanes, width);
    own.begins = (int32_t *)(own.before.outputs + lanes * (width + 2));
    own.ends = own.begins + lanes;
    own.queries = (uint32_t *)(own.ends + lanes);
    own.values = own.queries + lanes * (width / 2);
    own.powers = own.values + TILE / 2 * width;
    own.copies = own.powers + TILE / 2 * LANES;
    own.zeros = (bfloat16 *)(own.copies + copied(pass));
    memset(own.zeros, 0, width * sizeof(bfloat16));
    return own;
}

/* See attention.h. */
void EXPORT(attend_item)(const struct pass *pass, const struct scoring *scoring, const struct item *item, int64_t layer,
                         const void *query, int64_t query_stride, void *output, int64_t stride, char *memory,
                         float *partials)
{
    struct scratch own = scratch_at(pass, item->count, memory);
    attend_item(pass, scoring, item, layer, query, query_stride, output, stride, &own, partials);
}
void EXPORT(merge_item)(const struct pass *pass, const struct scoring *scoring, const struct item *merge, void *output,
                        int64_t stride, float *partials)
{
    merge_item(pass, scoring, merge, output, stride, partials);
}

/* Attention of all work items over what the pool holds of each request: the keys and values of the pass itself have been
 * written there, too. query: [tokens, heads, width], rows query_stride elements apart; output: [tokens, heads, width],
 * dense; both and the pool in bfloat16, values as wide as keys, a multiple of STEP; scores without a cap. Returns -1
 * when memory ran out, else 0. */
int EXPORT(attend)(const struct pass *pass, int64_t layer, const bfloat16 *query, int64_t query_stride,
                   bfloat16 *output, const struct scoring *scoring)
{
    const int64_t width = pass->keys.width, stride = pass->kv_heads * pass->group * width;
    int64_t bytes = EXPORT(attend_bytes)(pass, pass->most_tokens);
    char *memory = new_scratch(&bytes, EXPORT(partial_bytes)(pass));
    if (!memory)
        return -1;
    float *partials = (float *)(memory + bytes * omp_get_max_threads());
#pragma omp parallel
    {
        struct scratch own = scratch_at(pass, pass->most_tokens, memory + omp_get_thread_num() * bytes);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++) {
            const struct item *item = &pass->items[i];
            attend_item(pass, scoring, item, layer, query + before_item(pass, item, query_stride), query_stride,
                        output + before_item(pass, item, stride), stride, &own, partials);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->merge_count; i++)
            merge_item(pass, scoring, &pass->merges[i], output + before_item(pass, &pass->merges[i], stride), stride,
                       partials);
    }
    free(memory);
    return 0;
}
