/* Elementwise work of a forward pass on one row, in float32 or bfloat16: RMSNorm with the residual, the rotary embedding,
 * the SwiGLU gate and the writing of keys and values. */

#ifndef HEADRACE_ROWS_H
#define HEADRACE_ROWS_H

#include "simd.h"

INLINE vec add_part(void *x, const void *delta, int64_t i, int64_t n, int dtype)
{
    vec v = load_part(x, i, n, dtype);
    if (delta) {
        v = round_to(v + load_part(delta, i, n, dtype), dtype);
        store_part(x, i, n, v, dtype);
    }
    return v;
}

/* x += delta (unless it is NULL); normed = x / rms(x) * weight. All [width]. */
INLINE void norm_row(void *x, const void *delta, const void *weight, void *normed, int64_t width, float eps, int dtype)
{
    vec sums = splat(0), v;
    BY_VECTORS(width, (v = add_part(x, delta, i, n, dtype), sums += v * v));
    float scale = 1.0f / __builtin_sqrtf(horizontal_sum(sums) / (float)width + eps);
    BY_VECTORS(width, (v = round_to(load_part(x, i, n, dtype) * scale, dtype) * load_part(weight, i, n, dtype),
                      store_part(normed, i, n, round_to(v, dtype), dtype)));
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

/* Rotates heads [heads, width] of one row in place. See rotate(). */
INLINE void rotate_row(void *x, const float *cos, const float *sin, int64_t heads, int64_t width, int dtype)
{
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++) {
        void *low = at(x, head * width, dtype), *high = at(low, half, dtype);
        BY_VECTORS(half, rotate_part(low, high, cos, sin, half, i, n, dtype));
    }
}

/* activated = silu(gate) * up, each [width]. */
INLINE void gate_row(const void *gate, const void *up, void *activated, int64_t width, int dtype)
{
    vec v;
    BY_VECTORS(width, (v = swiglu(load_part(gate, i, n, dtype), load_part(up, i, n, dtype), dtype),
                      store_part(activated, i, n, v, dtype)));
}

INLINE void convert_row(const void *from, void *to, int64_t width, int dtype, int to_dtype)
{
    if (dtype == to_dtype)
        memcpy(to, from, width * item_bytes(dtype));
    else
        BY_VECTORS(width, store_part(to, i, n, round_to(load_part(from, i, n, dtype), to_dtype), to_dtype));
}

/* Writes heads x [heads, width] of one row: head h to the row of pool slot + h * page_size. */
INLINE void write_heads(const void *x, void *pool, int64_t slot, int64_t heads, int64_t width, int64_t page_size,
                        int dtype, int pool_dtype)
{
    for (int64_t head = 0; head < heads; head++)
        convert_row(at(x, head * width, dtype), at(pool, (slot + head * page_size) * width, pool_dtype), width, dtype,
                    pool_dtype);
}

#endif
