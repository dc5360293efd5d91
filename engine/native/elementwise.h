/* Elementwise CPU kernels of a forward pass, in float32 or bfloat16, each with one parallel region: RMSNorm with the
 * residual, the rotary embedding, the SwiGLU gate and the writing of keys and values.
 */

#include "simd.h"

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
    BY_VECTORS(width, (v = add_part(x, delta, i, n, dtype), sums += v * v));
    float scale = 1.0f / __builtin_sqrtf(horizontal_sum(sums) / (float)width + eps);
    BY_VECTORS(width, (v = round_to(load_part(x, i, n, dtype) * scale, dtype) * load_part(weight, i, n, dtype),
                      store_part(normed, i, n, round_to(v, dtype), dtype)));
}

/* hidden += delta (unless it is NULL); normed = hidden / rms(hidden) * weight. hidden, delta, normed: [rows, width];
 * weight: [width]; all dense and of one dtype. */
void EXPORT(add_norm)(void *hidden, const void *delta, const void *weight, void *normed, int64_t rows, int64_t width,
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
        BY_VECTORS(half, rotate_part(low, high, cos, sin, half, i, n, dtype));
    }
}

/* Rotary embedding of x [rows, heads, width] in place, rows `stride` elements apart: x * cos + (x with its halves
 * swapped) * sin. cos, sin: float32 [rows, width], dense; sin is negated in its first half. */
void EXPORT(rotate)(void *x, const float *cos, const float *sin, int64_t rows, int64_t stride, int64_t heads,
                     int64_t width, int64_t dtype)
{
#define ROW(type) rotate_row(at(x, row * stride, type), cos + row * width, sin + row * width, heads, width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

INLINE void gate_row(const void *gate, const void *up, void *activated, int64_t width, int dtype)
{
    vec v;
    BY_VECTORS(width, (v = swiglu(load_part(gate, i, n, dtype), load_part(up, i, n, dtype), dtype),
                      store_part(activated, i, n, v, dtype)));
}

/* SwiGLU gate: activated [rows, width] = silu(gate) * up, where a row of gate_up [rows, 2 * width] is gate, then up. */
void EXPORT(gate)(const void *gate_up, void *activated, int64_t rows, int64_t width, int64_t dtype)
{
#define ROW(type) gate_row(at(gate_up, 2 * row * width, type), at(gate_up, (2 * row + 1) * width, type), \
                           at(activated, row * width, type), width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

INLINE void convert_row(const void *from, void *to, int64_t width, int dtype, int to_dtype)
{
    if (dtype == to_dtype)
        memcpy(to, from, width * item_bytes(dtype));
    else
        BY_VECTORS(width, store_part(to, i, n, round_to(load_part(from, i, n, dtype), to_dtype), to_dtype));
}

INLINE void write_heads(const void *x, void *pool, int64_t slot, int64_t heads, int64_t width, int64_t page_size,
                        int dtype, int pool_dtype)
{
    for (int64_t head = 0; head < heads; head++)
        convert_row(at(x, head * width, dtype), at(pool, (slot + head * page_size) * width, pool_dtype), width, dtype,
                    pool_dtype);
}

/* Writes the keys and values of a layer to their slots: x [rows, heads, width], rows `stride` elements apart, to rows of
 * pool, which have `width` elements. Head h of a row goes to slots[row] + h * page_size. */
void EXPORT(write_slots)(const void *x, int64_t stride, const int64_t *slots, void *pool, int64_t rows, int64_t heads,
                          int64_t width, int64_t page_size, int64_t dtype, int64_t pool_dtype)
{
#define WRITE(type, pool_type) \
    write_heads(at(x, row * stride, type), pool, slots[row], heads, width, page_size, type, pool_type)
#define ROW(type) pool_dtype == FLOAT32 ? WRITE(type, FLOAT32) : WRITE(type, BFLOAT16)
    FOR_EACH_ROW(ROW)
#undef ROW
#undef WRITE
}
