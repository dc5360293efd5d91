/* A forward pass on the CPU, each part of it in one parallel region: matrix products and attention over the paged pool in
 * float32; RMSNorm with the residual, the rotary embedding and the gated activation in bfloat16, too.
 *
 * Plain C with GCC's vector extension and OpenMP, called through ctypes (engine/native/__init__.py), which checks
 * shapes, strides and dtypes. Threads are those that torch computes with: both use one OpenMP runtime.
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

#define HOT static inline __attribute__((always_inline))
#define LANES 16  /* query rows that are computed side by side: two vectors */
#define TILE 64   /* keys at a time; their keys and values stay in the fastest caches */

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

HOT vec load(const float *from) { return *(const vec *)from; }
HOT void store(float *to, vec value) { *(vec *)to = value; }
HOT vec splat(float v) { return (vec){v, v, v, v, v, v, v, v}; }
HOT vec either(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
#if defined(__x86_64__)
HOT vec larger(vec a, vec b) { return (vec)__builtin_ia32_maxps256(a, b); }
HOT vec smaller(vec a, vec b) { return (vec)__builtin_ia32_minps256(a, b); }
#else
HOT vec larger(vec a, vec b) { return either(a > b, a, b); }
HOT vec smaller(vec a, vec b) { return either(a < b, a, b); }
#endif

HOT float total(vec v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* 2 to the power of x, for x < 128, and infinity at 128; 0 below the smallest normal number. A polynomial on [-1/2, 1/2]
 * (Taylor's, to the seventh power: below one unit in the last place), times a power of two made in the exponent's bits. */
HOT vec power_of_two(vec x)
{
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec clamped = larger(x, splat(-127.0f));
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
    ivec scale = ((ivec)shifted + 127) << 23; /* the integer stands in the low bits; -127 gives the exponent of 0 */
    return p * (vec)scale;
}

HOT vec sigmoid(vec x) { return 1.0f / (1.0f + power_of_two(smaller(x * -1.4426950408889634f, splat(128)))); }

/* ---- rows in any dtype ------------------------------------------------------------------------------------------ */

/* A step for every eight elements of a row, from i on; n is less than eight for what is left at its end. */
#define BY_EIGHTS(width, step)                            \
    do {                                                  \
        int64_t i = 0;                                    \
        for (const int64_t n = 8; i + n <= width; i += n) \
            step;                                         \
        const int64_t n = width - i;                      \
        if (n)                                            \
            step;                                         \
    } while (0)

/* The dtype is known to the compiler wherever these are used. */
HOT int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
HOT char *at(const void *rows, int64_t index, int dtype) { return (char *)rows + index * size_of(dtype); }

#if defined(__x86_64__)
typedef short shorts __attribute__((vector_size(16), aligned(2), may_alias));
HOT vec float16(const void *from) { return (vec)__builtin_ia32_vcvtph2ps256(*(const shorts *)from); }
#else
typedef _Float16 float16s __attribute__((vector_size(16), aligned(2), may_alias));
HOT vec float16(const void *from) { return __builtin_convertvector(*(const float16s *)from, vec); }
#endif

HOT vec take(const void *row, int64_t i, int64_t n, int dtype)
{
    const void *from = at(row, i, dtype);
    char last[32] = {0};
    if (n < 8)
        from = memcpy(last, from, n * size_of(dtype));
    if (dtype == FLOAT32)
        return *(const vec *)from;
    if (dtype == BFLOAT16)
        return (vec)(__builtin_convertvector(*(const halves *)from, uvec) << 16);
    return float16(from);
}

/* To the nearest number whose lower half is zero, and of two to the even one. NaN stays NaN: those of 16 bits, and those
 * that the CPU makes, have a lower half of zeros, too. */
HOT vec rounded(vec v, int dtype)
{
    uvec bits = (uvec)v;
    return dtype == FLOAT32 ? v : (vec)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

/* In float32, or v rounded to BFLOAT16. */
HOT void put(void *row, int64_t i, int64_t n, vec v, int dtype)
{
    char *to = at(row, i, dtype);
    halves upper = __builtin_convertvector((uvec)v >> 16, halves);
    if (n < 8)
        memcpy(to, dtype == FLOAT32 ? (const void *)&v : &upper, n * size_of(dtype));
    else if (dtype == FLOAT32)
        *(vec *)to = v;
    else
        *(halves *)to = upper;
}

/* ---- elementwise ------------------------------------------------------------------------------------------------ */

/* step(type) for every `row` of `rows`, with their `dtype` as a constant. */
#define EVERY_ROW(step)                                                                                    \
    _Pragma("omp parallel for schedule(static) if (rows > 1)") for (int64_t row = 0; row < rows; row++)    \
    {                                                                                                      \
        if (dtype == FLOAT32)                                                                              \
            step(FLOAT32);                                                                                 \
        else                                                                                               \
            step(BFLOAT16);                                                                                \
    }

HOT vec add_part(void *x, const void *delta, int64_t i, int64_t n, int dtype)
{
    vec v = take(x, i, n, dtype);
    if (delta) {
        v = rounded(v + take(delta, i, n, dtype), dtype);
        put(x, i, n, v, dtype);
    }
    return v;
}

HOT void norm_row(void *x, const void *delta, const void *weight, void *normed, int64_t width, float eps, int dtype)
{
    vec sums = splat(0), v;
    BY_EIGHTS(width, (v = add_part(x, delta, i, n, dtype), sums += v * v));
    float scale = 1.0f / __builtin_sqrtf(total(sums) / (float)width + eps);
    BY_EIGHTS(width, (v = rounded(take(x, i, n, dtype) * scale, dtype) * take(weight, i, n, dtype),
                      put(normed, i, n, rounded(v, dtype), dtype)));
}

/* hidden += delta (unless that is NULL); normed = hidden / rms(hidden) * weight. All [rows, width], dense. */
void headrace_add_norm(void *hidden, const void *delta, const void *weight, void *normed, int64_t rows, int64_t width,
                       float eps, int64_t dtype)
{
#define ROW(type) norm_row(at(hidden, row * width, type), delta ? at(delta, row * width, type) : NULL, weight, \
                           at(normed, row * width, type), width, eps, type)
    EVERY_ROW(ROW)
#undef ROW
}

HOT void rotate_part(void *low, void *high, const float *cos, const float *sin, int64_t half, int64_t i, int64_t n,
                     int dtype)
{
    vec a = take(low, i, n, dtype), b = take(high, i, n, dtype);
    vec low_cos = take(cos, i, n, FLOAT32), low_sin = take(sin, i, n, FLOAT32);
    vec high_cos = take(cos + half, i, n, FLOAT32), high_sin = take(sin + half, i, n, FLOAT32);
    put(low, i, n, rounded(a * low_cos + b * low_sin, dtype), dtype);
    put(high, i, n, rounded(b * high_cos + a * high_sin, dtype), dtype);
}

HOT void rotate_row(void *x, const float *cos, const float *sin, int64_t heads, int64_t width, int dtype)
{
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++) {
        void *low = at(x, head * width, dtype), *high = at(low, half, dtype);
        BY_EIGHTS(half, rotate_part(low, high, cos, sin, half, i, n, dtype));
    }
}

/* Rotate x [rows, heads, width] in place, rows `stride` elements apart; cos and sin float32 [rows, width], sin negative in
 * its first half: x * cos + (x with its halves swapped) * sin. */
void headrace_rotate(void *x, const float *cos, const float *sin, int64_t rows, int64_t stride, int64_t heads,
                     int64_t width, int64_t dtype)
{
#define ROW(type) rotate_row(at(x, row * stride, type), cos + row * width, sin + row * width, heads, width, type)
    EVERY_ROW(ROW)
#undef ROW
}

HOT void gate_row(const void *gate, const void *up, void *activated, int64_t width, int dtype)
{
    vec g, v;
    BY_EIGHTS(width, (g = take(gate, i, n, dtype), v = rounded(g * sigmoid(g), dtype) * take(up, i, n, dtype),
                      put(activated, i, n, rounded(v, dtype), dtype)));
}

/* activated [rows, width] = silu(gate) * up, of gate_up [rows, 2 * width]. */
void headrace_gate(const void *gate_up, void *activated, int64_t rows, int64_t width, int64_t dtype)
{
#define ROW(type) gate_row(at(gate_up, 2 * row * width, type), at(gate_up, (2 * row + 1) * width, type), \
                           at(activated, row * width, type), width, type)
    EVERY_ROW(ROW)
#undef ROW
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out[i][lane] = start[i][lane] * keep[lane] + sum over k of a[i * row + k * step] * b[k][lane], for n rows i. Rows of
 * out and start are `apart` elements apart; start NULL is 0. Twelve sums, two vectors and a factor fill the registers. */
HOT void product(int n, float *out, const float *start, int64_t apart, vec keep0, vec keep1, const float *a, int64_t row,
                 int64_t step, const float *b, int64_t depth)
{
    vec low[6], high[6];
    for (int i = 0; i < n; i++) {
        low[i] = high[i] = splat(0);
        if (start) {
            low[i] = load(start + i * apart) * keep0;
            high[i] = load(start + i * apart + 8) * keep1;
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
        store(out + i * apart, low[i]);
        store(out + i * apart + 8, high[i]);
    }
}

/* The same for any number of rows, at most six at a time, and as many every time as can be. */
HOT void products(int64_t rows, float *out, const float *start, int64_t apart, vec keep0, vec keep1, const float *a,
                  int64_t row, int64_t step, const float *b, int64_t depth)
{
    for (int64_t i = 0, turns = (rows + 5) / 6, n; turns > 0; i += n, turns--) {
        n = (rows - i + turns - 1) / turns;
        float *to = out + i * apart;
        const float *from = start ? start + i * apart : NULL, *factors = a + i * row;
        switch (n) {
        case 6: product(6, to, from, apart, keep0, keep1, factors, row, step, b, depth); break;
        case 5: product(5, to, from, apart, keep0, keep1, factors, row, step, b, depth); break;
        case 4: product(4, to, from, apart, keep0, keep1, factors, row, step, b, depth); break;
        case 3: product(3, to, from, apart, keep0, keep1, factors, row, step, b, depth); break;
        case 2: product(2, to, from, apart, keep0, keep1, factors, row, step, b, depth); break;
        default: product(1, to, from, apart, keep0, keep1, factors, row, step, b, depth);
        }
    }
}

#define ROWS 128  /* of x that stay in the second cache while a block of the matrix goes by */
#define DEPTH 576 /* of a panel that is read at a time, little more than the first cache */
#define PANELS 3  /* per piece of work: small enough for even shares */

/* out [rows, columns] = x [rows, depth] times a matrix packed as [columns / LANES, depth, LANES]. Dense, both. */
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
                products(count, to, from ? to : NULL, columns, splat(1), splat(1), x + row * depth + from, depth, 1,
                         packed + (panel * depth + from) * LANES, now);
            }
        }
    }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* Rows [row, row + count) of the batch are positions [start, start + count) of one request. */
struct span {
    int64_t start, count, row;
    const int64_t *pages;
};

/* The queries of `count` tokens from `first` on of one span, for one head of keys and values. */
struct item {
    int64_t span, head, first, count;
};

struct pass {
    const void *pool; /* [pages, layers, 2, kv_heads, page_size, width] */
    int64_t dtype, page_size, page_stride, kv_heads, group, width;
    const struct span *spans;
    const struct item *items; /* the longest first */
    int64_t item_count, most_tokens;
};

/* What one thread works in. Queries and outputs are transposed: LANES rows side by side, one panel after the other. */
struct scratch {
    float *queries, *outputs; /* [panels, width, LANES] */
    float *tops, *sums;       /* [panels, LANES]: largest score so far, and the sum of powers */
    float *keys, *values;     /* [TILE, width] */
    float *scores;            /* [TILE, LANES] */
};

HOT void widen(float *to, const void *from, int64_t elements, int dtype)
{
    BY_EIGHTS(elements, put(to, i, n, take(from, i, n, dtype), FLOAT32));
}

HOT void copy_rows(float *to, const void *pool, int64_t offset, int64_t elements, int64_t dtype)
{
    if (dtype == FLOAT32)
        memcpy(to, at(pool, offset, FLOAT32), elements * sizeof(float));
    else if (dtype == BFLOAT16)
        widen(to, at(pool, offset, BFLOAT16), elements, BFLOAT16);
    else
        widen(to, at(pool, offset, FLOAT16), elements, FLOAT16);
}

/* Keys and values of positions [from, from + count), those of this pass from keys_values, earlier ones from the pool. */
static void gather(const struct pass *pass, const struct span *span, int64_t layer, int64_t head,
                   const float *keys_values, int64_t kv_stride, int64_t from, int64_t count, struct scratch *own)
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
        copy_rows(own->keys + j * width, pass->pool, offset, run * width, pass->dtype);
        copy_rows(own->values + j * width, pass->pool, offset + plane, run * width, pass->dtype);
        j += run;
    }
    for (; j < count; j++) {
        const float *row = keys_values + (span->row + from + j - span->start) * kv_stride + head * width;
        memcpy(own->keys + j * width, row, width * sizeof(float));
        memcpy(own->values + j * width, row + pass->kv_heads * width, width * sizeof(float));
    }
}

/* One panel of queries meets the tile's first `count` keys, which stand at positions from `from` on. ends[lane]: one
 * past the last position that the lane's query sees. */
static void meet(const struct pass *pass, struct scratch *own, int64_t panel, int64_t from, int64_t count, ivec ends0,
                 ivec ends1, int masked)
{
    const int64_t width = pass->width;
    float *scores = own->scores, *tops = own->tops + panel * LANES, *sums = own->sums + panel * LANES;
    float *outputs = own->outputs + panel * width * LANES;
    products(count, scores, NULL, LANES, splat(0), splat(0), own->keys, width, 1, own->queries + panel * width * LANES,
             width);

    const vec none = splat(-1e30f);
    vec top0 = load(tops), top1 = load(tops + 8), before0 = top0, before1 = top1;
    for (int64_t j = 0; j < count; j++) {
        vec s0 = load(scores + j * LANES), s1 = load(scores + j * LANES + 8);
        if (masked) {
            ivec position = (ivec){0} + (int32_t)(from + j);
            s0 = either(position < ends0, s0, none);
            s1 = either(position < ends1, s1, none);
            store(scores + j * LANES, s0);
            store(scores + j * LANES + 8, s1);
        }
        top0 = larger(top0, s0);
        top1 = larger(top1, s1);
    }
    vec keep0 = power_of_two(before0 - top0), keep1 = power_of_two(before1 - top1);
    vec sum0 = load(sums) * keep0, sum1 = load(sums + 8) * keep1;
    for (int64_t j = 0; j < count; j++) {
        vec p0 = power_of_two(load(scores + j * LANES) - top0), p1 = power_of_two(load(scores + j * LANES + 8) - top1);
        store(scores + j * LANES, p0);
        store(scores + j * LANES + 8, p1);
        sum0 += p0;
        sum1 += p1;
    }
    store(tops, top0);
    store(tops + 8, top1);
    store(sums, sum0);
    store(sums + 8, sum1);
    products(width, outputs, outputs, LANES, keep0, keep1, own->values, 1, width, scores, count);
}

static void compute(const struct pass *pass, const struct item *item, int64_t layer, const float *query,
                    int64_t query_stride, const float *keys_values, int64_t kv_stride, float *output, float scale,
                    struct scratch *own)
{
    const struct span *span = &pass->spans[item->span];
    const int64_t width = pass->width, group = pass->group, rows = item->count * group;
    const int64_t panels = (rows + LANES - 1) / LANES, first_row = span->row + item->first;
    const int64_t end = span->start + item->first + item->count, heads = pass->kv_heads * group;

    memset(own->outputs, 0, panels * width * LANES * sizeof(float));
    memset(own->sums, 0, panels * LANES * sizeof(float));
    for (int64_t r = 0; r < panels * LANES; r++) {
        float *to = own->queries + (r / LANES) * width * LANES + r % LANES;
        int64_t known = r < rows ? r : rows - 1; /* lanes without a query repeat the last one */
        const float *from = query + (first_row + known / group) * query_stride + (item->head * group + known % group) * width;
        for (int64_t d = 0; d < width; d++)
            to[d * LANES] = from[d] * scale;
        own->tops[r] = -1e30f;
    }
    for (int64_t from = 0; from < end; from += TILE) {
        int64_t count = end - from < TILE ? end - from : TILE;
        gather(pass, span, layer, item->head, keys_values, kv_stride, from, count, own);
        for (int64_t panel = 0; panel < panels; panel++) {
            int32_t ends[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t r = panel * LANES + lane < rows ? panel * LANES + lane : rows - 1;
                ends[lane] = (int32_t)(span->start + item->first + r / group + 1);
            }
            int64_t seen = ends[LANES - 1] - from < count ? ends[LANES - 1] - from : count;
            if (seen > 0)
                meet(pass, own, panel, from, seen, *(ivec *)ends, *(ivec *)(ends + 8), from + seen > ends[0]);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *from = own->outputs + (r / LANES) * width * LANES + r % LANES;
        float *to = output + ((first_row + r / group) * heads + item->head * group + r % group) * width;
        float share = 1.0f / own->sums[r];
        for (int64_t d = 0; d < width; d++)
            to[d] = from[d * LANES] * share;
    }
}

/* Causal attention of all items over the prefixes in the pool and the keys and values of the pass itself.
 * query [tokens, heads, width] and keys_values [tokens, 2 * kv_heads, width], rows query_stride and kv_stride elements
 * apart; output [tokens, heads, width], dense. scale: of the scores, times log2(e). Returns -1 without memory. */
int headrace_attend(const struct pass *pass, int64_t layer, const float *query, int64_t query_stride,
                    const float *keys_values, int64_t kv_stride, float *output, float scale)
{
    const int64_t panels = (pass->most_tokens * pass->group + LANES - 1) / LANES, width = pass->width;
    const int64_t floats = panels * LANES * (2 * width + 2) + TILE * (2 * width + LANES);
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        struct scratch own;
        if (memory) {
            own.queries = memory;
            own.outputs = own.queries + panels * width * LANES;
            own.keys = own.outputs + panels * width * LANES;
            own.values = own.keys + TILE * width;
            own.scores = own.values + TILE * width;
            own.tops = own.scores + TILE * LANES;
            own.sums = own.tops + panels * LANES;
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pass->item_count; i++)
            if (memory)
                compute(pass, &pass->items[i], layer, query, query_stride, keys_values, kv_stride, output, scale, &own);
        free(memory);
    }
    return failed ? -1 : 0;
}
