/* CPU kernels of a forward pass, each with one parallel region: matrix products and attention over the paged KV pool in
 * float32; RMSNorm with the residual, the rotary embedding and the SwiGLU gate in float32 or bfloat16.
 *
 * Plain C with GCC's vector extension and OpenMP, called through ctypes. Shapes, strides and dtypes are checked there
 * (engine/native/__init__.py). The threads are torch's: both use one OpenMP runtime.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
int headrace_usable(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#pragma GCC target("avx2,fma,f16c")
#else
int headrace_usable(void) { return 1; }
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16  /* query rows (or matrix columns) computed side by side: two vectors */
#define TILE 64   /* keys processed at a time; their keys and values stay in the L1 and L2 caches */

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec splat(float v) { return (vec){v, v, v, v, v, v, v, v}; }
INLINE vec blend(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
#if defined(__x86_64__)
/* If a or b is NaN, the result is b. */
INLINE vec vec_max(vec a, vec b) { return (vec)__builtin_ia32_maxps256(a, b); }
INLINE vec vec_min(vec a, vec b) { return (vec)__builtin_ia32_minps256(a, b); }
#else
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }
INLINE vec vec_min(vec a, vec b) { return blend(a < b, a, b); }
#endif

INLINE float horizontal_sum(vec v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* 2 to the power of x for x < 128; infinity at 128, 0 below the smallest normal number, NaN for NaN. Range reduction to
 * [-1/2, 1/2], a Taylor polynomial of degree 7 (error below one unit in the last place), times a power of two set in the
 * exponent bits. */
INLINE vec exp2_approx(vec x)
{
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec clamped = vec_max(splat(-127.0f), x);
    vec shifted = clamped + magic;
    vec f = clamped - (shifted - magic);
    vec p = splat(1.5252733804e-5f);
    p = p * f + 1.5403530393e-4f;
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    ivec scale = ((ivec)shifted + 127) << 23; /* the integer is in the low bits; -127 gives the exponent of 0 */
    return p * (vec)scale;
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp2_approx(vec_min(x * -1.4426950408889634f, splat(128)))); }

/* ---- rows in any dtype ------------------------------------------------------------------------------------------ */

/* Runs step for every eight elements i .. i + n of a row; n is less than eight for the rest at its end. */
#define BY_EIGHTS(width, step)                            \
    do {                                                  \
        int64_t i = 0;                                    \
        for (const int64_t n = 8; i + n <= width; i += n) \
            step;                                         \
        const int64_t n = width - i;                      \
        if (n)                                            \
            step;                                         \
    } while (0)

/* dtype is a constant wherever these are inlined, so the branches are resolved by the compiler. */
INLINE int64_t item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE char *at(const void *rows, int64_t index, int dtype) { return (char *)rows + index * item_bytes(dtype); }

#if defined(__x86_64__)
typedef short shorts __attribute__((vector_size(16), aligned(2), may_alias));
INLINE vec float16(const void *from) { return (vec)__builtin_ia32_vcvtph2ps256(*(const shorts *)from); }
#else
typedef _Float16 float16s __attribute__((vector_size(16), aligned(2), may_alias));
INLINE vec float16(const void *from) { return __builtin_convertvector(*(const float16s *)from, vec); }
#endif

INLINE vec load_part(const void *row, int64_t i, int64_t n, int dtype)
{
    const void *from = at(row, i, dtype);
    char last[32] = {0};
    if (n < 8)
        from = memcpy(last, from, n * item_bytes(dtype));
    if (dtype == FLOAT32)
        return *(const vec *)from;
    if (dtype == BFLOAT16)
        return (vec)(__builtin_convertvector(*(const halves *)from, uvec) << 16);
    return float16(from);
}

/* Rounds to bfloat16 precision, to nearest even; the result is a float32 whose lower half is zero. NaN stays NaN: those
 * of 16 bits, and those that the CPU generates, have a lower half of zeros, too. */
INLINE vec round_to(vec v, int dtype)
{
    uvec bits = (uvec)v;
    return dtype == FLOAT32 ? v : (vec)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

/* Stores n elements: v as float32, or the upper halves of v, which is rounded already, as bfloat16. */
INLINE void store_part(void *row, int64_t i, int64_t n, vec v, int dtype)
{
    char *to = at(row, i, dtype);
    halves upper = __builtin_convertvector((uvec)v >> 16, halves);
    if (n < 8)
        memcpy(to, dtype == FLOAT32 ? (const void *)&v : &upper, n * item_bytes(dtype));
    else if (dtype == FLOAT32)
        *(vec *)to = v;
    else
        *(halves *)to = upper;
}

/* ---- elementwise ------------------------------------------------------------------------------------------------ */

/* step(type) for every `row` of `rows` in parallel, with `dtype` as a constant. */
#define FOR_EACH_ROW(step)                                                                                 \
    _Pragma("omp parallel for schedule(static) if (rows > 1)") for (int64_t row = 0; row < rows; row++)    \
    {                                                                                                      \
        if (dtype == FLOAT32)                                                                              \
            step(FLOAT32);                                                                                 \
        else                                                                                               \
            step(BFLOAT16);                                                                                \
    }

INLINE vec add_part(void *x, const void *delta, int64_t i, int64_t n, int dtype)
{
    vec v = load_part(x, i, n, dtype);
    if (delta) {
        v = round_to(v + load_part(delta, i, n, dtype), dtype);
        store_part(x, i, n, v, dtype);
    }
    return v;
}

INLINE void norm_row(void *x, const void *delta, const void *weight, void *normed, int64_t width, float eps, int dtype)
{
    vec sums = splat(0), v;
    BY_EIGHTS(width, (v = add_part(x, delta, i, n, dtype), sums += v * v));
    float scale = 1.0f / __builtin_sqrtf(horizontal_sum(sums) / (float)width + eps);
    BY_EIGHTS(width, (v = round_to(load_part(x, i, n, dtype) * scale, dtype) * load_part(weight, i, n, dtype),
                      store_part(normed, i, n, round_to(v, dtype), dtype)));
}

/* hidden += delta (unless it is NULL); normed = hidden / rms(hidden) * weight. hidden, delta, normed: [rows, width];
 * weight: [width]; all dense and of one dtype. */
void headrace_add_norm(void *hidden, const void *delta, const void *weight, void *normed, int64_t rows, int64_t width,
                       float eps, int64_t dtype)
{
#define ROW(type) norm_row(at(hidden, row * width, type), delta ? at(delta, row * width, type) : NULL, weight, \
                           at(normed, row * width, type), width, eps, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

INLINE void rotate_part(void *low, void *high, const float *cos, const float *sin, int64_t half, int64_t i, int64_t n,
                        int dtype)
{
    vec a = load_part(low, i, n, dtype), b = load_part(high, i, n, dtype);
    vec low_cos = load_part(cos, i, n, FLOAT32), low_sin = load_part(sin, i, n, FLOAT32);
    vec high_cos = load_part(cos + half, i, n, FLOAT32), high_sin = load_part(sin + half, i, n, FLOAT32);
    store_part(low, i, n, round_to(a * low_cos + b * low_sin, dtype), dtype);
    store_part(high, i, n, round_to(b * high_cos + a * high_sin, dtype), dtype);
}

INLINE void rotate_row(void *x, const float *cos, const float *sin, int64_t heads, int64_t width, int dtype)
{
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++) {
        void *low = at(x, head * width, dtype), *high = at(low, half, dtype);
        BY_EIGHTS(half, rotate_part(low, high, cos, sin, half, i, n, dtype));
    }
}

/* Rotary embedding of x [rows, heads, width] in place, rows `stride` elements apart: x * cos + (x with its halves
 * swapped) * sin. cos, sin: float32 [rows, width], dense; sin is negated in its first half. */
void headrace_rotate(void *x, const float *cos, const float *sin, int64_t rows, int64_t stride, int64_t heads,
                     int64_t width, int64_t dtype)
{
#define ROW(type) rotate_row(at(x, row * stride, type), cos + row * width, sin + row * width, heads, width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

INLINE void gate_row(const void *gate, const void *up, void *activated, int64_t width, int dtype)
{
    vec g, v;
    BY_EIGHTS(width, (g = load_part(gate, i, n, dtype),
                      v = round_to(g * sigmoid(g), dtype) * load_part(up, i, n, dtype),
                      store_part(activated, i, n, round_to(v, dtype), dtype)));
}

/* SwiGLU gate: activated [rows, width] = silu(gate) * up, where a row of gate_up [rows, 2 * width] is gate, then up. */
void headrace_gate(const void *gate_up, void *activated, int64_t rows, int64_t width, int64_t dtype)
{
#define ROW(type) gate_row(at(gate_up, 2 * row * width, type), at(gate_up, (2 * row + 1) * width, type), \
                           at(activated, row * width, type), width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* Microkernel: out[i][lane] = start[i][lane] * keep[lane] + sum over k of a[i * row + k * step] * b[k][lane], for n
 * rows i and LANES lanes. Rows of out and start are out_stride elements apart; start NULL means 0. keep0, keep1:
 * factors of lanes 0-7 and 8-15. With n = 6, twelve sums, two vectors of b and a factor fill the sixteen vector
 * registers. */
INLINE void microkernel(int n, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1, const float *a,
                        int64_t row, int64_t step, const float *b, int64_t depth)
{
    vec low[6], high[6];
    for (int i = 0; i < n; i++) {
        low[i] = high[i] = splat(0);
        if (start) {
            low[i] = load(start + i * out_stride) * keep0;
            high[i] = load(start + i * out_stride + 8) * keep1;
        }
    }
    for (int64_t k = 0; k < depth; k++) {
        vec b0 = load(b + k * LANES), b1 = load(b + k * LANES + 8);
        for (int i = 0; i < n; i++) {
            vec factor = splat(a[i * row + k * step]);
            low[i] += factor * b0;
            high[i] += factor * b1;
        }
    }
    for (int i = 0; i < n; i++) {
        store(out + i * out_stride, low[i]);
        store(out + i * out_stride + 8, high[i]);
    }
}

/* The same for any number of rows, in evenly sized calls of at most six rows. */
INLINE void multiply_rows(int64_t rows, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1,
                          const float *a, int64_t row, int64_t step, const float *b, int64_t depth)
{
    for (int64_t i = 0, turns = (rows + 5) / 6, n; turns > 0; i += n, turns--) {
        n = (rows - i + turns - 1) / turns;
        float *to = out + i * out_stride;
        const float *from = start ? start + i * out_stride : NULL, *factors = a + i * row;
        switch (n) {
        case 6: microkernel(6, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 5: microkernel(5, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 4: microkernel(4, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 3: microkernel(3, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 2: microkernel(2, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        default: microkernel(1, to, from, out_stride, keep0, keep1, factors, row, step, b, depth);
        }
    }
}

#define ROWS 128  /* of x per work item; they stay in the L2 cache while panels of the matrix are read */
#define DEPTH 576 /* elements of depth processed at a time; that part of a panel about fills the L1 cache */
#define PANELS 3  /* per work item; few enough to balance the threads */

/* out [rows, columns] = x [rows, depth] times a matrix packed as [columns / LANES, depth, LANES]; all dense float32. A
 * work item is PANELS panels of the matrix times ROWS rows of x. */
void headrace_multiply(const float *x, const float *packed, float *out, int64_t rows, int64_t columns, int64_t depth)
{
    const int64_t panels = columns / LANES, across = (panels + PANELS - 1) / PANELS, down = (rows + ROWS - 1) / ROWS;
    const int64_t turns = (depth + DEPTH - 1) / DEPTH, at_once = (depth + turns - 1) / turns;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < across * down; piece++) {
        const int64_t first = piece % across * PANELS, last = first + PANELS < panels ? first + PANELS : panels;
        const int64_t row = piece / across * ROWS, count = row + ROWS < rows ? ROWS : rows - row;
        for (int64_t from = 0; from < depth; from += at_once) {
            const int64_t now = from + at_once < depth ? at_once : depth - from;
            for (int64_t panel = first; panel < last; panel++) {
                float *to = out + row * columns + panel * LANES;
                multiply_rows(count, to, from ? to : NULL, columns, splat(1), splat(1), x + row * depth + from, depth,
                              1, packed + (panel * depth + from) * LANES, now);
            }
        }
    }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* Rows [row, row + count) of the batch are positions [start, start + count) of one request; pages: ids covering
 * [0, start + count). */
struct span {
    int64_t start, count, row;
    const int64_t *pages;
};

/* A work item: the queries of `count` tokens from `first` of one span, for one KV head. */
struct item {
    int64_t span, head, first, count;
};

/* One forward pass. group: query heads per KV head; page_stride: elements of a page; most_tokens: of any item. */
struct pass {
    const void *pool; /* [pages, layers, 2, kv_heads, page_size, width] */
    int64_t dtype, page_size, page_stride, kv_heads, group, width;
    const struct span *spans;
    const struct item *items; /* the most expensive first */
    int64_t item_count, most_tokens;
};

/* Working memory of one thread. Queries and outputs are transposed: panels of LANES rows side by side. */
struct scratch {
    float *queries, *outputs; /* [panels, width, LANES] */
    float *maxima, *sums;     /* [panels, LANES]: running maximum of the scores, and sum of their exponentials */
    float *keys, *values;     /* [TILE, width] */
    float *scores;            /* [TILE, LANES] */
};

INLINE void widen(float *to, const void *from, int64_t elements, int dtype)
{
    BY_EIGHTS(elements, store_part(to, i, n, load_part(from, i, n, dtype), FLOAT32));
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

/* Copies keys and values of positions [from, from + count) to scratch: this pass's own from keys_values, earlier ones
 * from the pool. */
static void gather_tile(const struct pass *pass, const struct span *span, int64_t layer, int64_t head,
                        const float *keys_values, int64_t kv_stride, int64_t from, int64_t count,
                        struct scratch *scratch)
{
    const int64_t width = pass->width, size = pass->page_size, plane = pass->kv_heads * size * width;
    int64_t j = 0;
    while (j < count && from + j < span->start) {
        int64_t slot = (from + j) % size, run = size - slot;
        if (run > count - j)
            run = count - j;
        if (run > span->start - from - j)
            run = span->start - from - j;
        int64_t offset = span->pages[(from + j) / size] * pass->page_stride + 2 * layer * plane;
        offset += (head * size + slot) * width;
        copy_rows(scratch->keys + j * width, pass->pool, offset, run * width, pass->dtype);
        copy_rows(scratch->values + j * width, pass->pool, offset + plane, run * width, pass->dtype);
        j += run;
    }
    for (; j < count; j++) {
        const float *row = keys_values + (span->row + from + j - span->start) * kv_stride + head * width;
        memcpy(scratch->keys + j * width, row, width * sizeof(float));
        memcpy(scratch->values + j * width, row + pass->kv_heads * width, width * sizeof(float));
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
                  scratch->queries + panel * width * LANES, width);

    const vec no_score = splat(-1e30f);
    vec max0 = load(maxima), max1 = load(maxima + 8), old_max0 = max0, old_max1 = max1;
    for (int64_t j = 0; j < count; j++) {
        vec s0 = load(scores + j * LANES), s1 = load(scores + j * LANES + 8);
        if (masked) {
            ivec position = (ivec){0} + (int32_t)(from + j);
            s0 = blend(position < ends0, s0, no_score);
            s1 = blend(position < ends1, s1, no_score);
            store(scores + j * LANES, s0);
            store(scores + j * LANES + 8, s1);
        }
        max0 = vec_max(s0, max0); /* never NaN: a NaN score gives a NaN weight below, and so a NaN output */
        max1 = vec_max(s1, max1);
    }
    vec keep0 = exp2_approx(old_max0 - max0), keep1 = exp2_approx(old_max1 - max1);
    vec sum0 = load(sums) * keep0, sum1 = load(sums + 8) * keep1;
    for (int64_t j = 0; j < count; j++) {
        vec p0 = exp2_approx(load(scores + j * LANES) - max0), p1 = exp2_approx(load(scores + j * LANES + 8) - max1);
        store(scores + j * LANES, p0);
        store(scores + j * LANES + 8, p1);
        sum0 += p0;
        sum1 += p1;
    }
    store(maxima, max0);
    store(maxima + 8, max1);
    store(sums, sum0);
    store(sums + 8, sum1);
    multiply_rows(width, outputs, outputs, LANES, keep0, keep1, scratch->values, 1, width, scores, count);
}

/* Attention of one work item: packs its queries, visits all tiles of keys, writes normalised outputs. */
static void attend_item(const struct pass *pass, const struct item *item, int64_t layer, const float *query,
                        int64_t query_stride, const float *keys_values, int64_t kv_stride, float *output, float scale,
                        struct scratch *scratch)
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
        gather_tile(pass, span, layer, item->head, keys_values, kv_stride, from, count, scratch);
        for (int64_t panel = 0; panel < panels; panel++) {
            int32_t ends[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t r = panel * LANES + lane < rows ? panel * LANES + lane : rows - 1;
                ends[lane] = (int32_t)(span->start + item->first + r / group + 1);
            }
            int64_t visible = ends[LANES - 1] - from < count ? ends[LANES - 1] - from : count;
            if (visible > 0)
                attend_tile(pass, scratch, panel, from, visible, *(ivec *)ends, *(ivec *)(ends + 8),
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

/* Causal attention of all work items over the prefixes in the pool and the keys and values of the pass itself.
 * query: [tokens, heads, width], keys_values: [tokens, 2 * kv_heads, width], rows query_stride and kv_stride elements
 * apart; output: [tokens, heads, width], dense; all float32. scale: of the scores, times log2(e). Returns -1 when
 * memory ran out, else 0. */
int headrace_attend(const struct pass *pass, int64_t layer, const float *query, int64_t query_stride,
                    const float *keys_values, int64_t kv_stride, float *output, float scale)
{
    const int64_t panels = (pass->most_tokens * pass->group + LANES - 1) / LANES, width = pass->width;
    const int64_t floats = panels * LANES * (2 * width + 2) + TILE * (2 * width + LANES);
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        struct scratch scratch;
        if (memory) {
            scratch.queries = memory;
            scratch.outputs = scratch.queries + panels * width * LANES;
            scratch.keys = scratch.outputs + panels * width * LANES;
            scratch.values = scratch.keys + TILE * width;
            scratch.scores = scratch.values + TILE * width;
            scratch.maxima = scratch.scores + TILE * LANES;
            scratch.sums = scratch.maxima + panels * LANES;
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++)
            if (memory)
                attend_item(pass, &pass->items[i], layer, query, query_stride, keys_values, kv_stride, output, scale,
                            &scratch);
        free(memory);
    }
    return failed ? -1 : 0;
}
