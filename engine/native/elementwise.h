/* Elementwise CPU kernels of a forward pass, in float32 or bfloat16, each with one parallel region: RMSNorm with the
 * residual, the rotary embedding, the SwiGLU gate and the writing of keys and values.
 */

#include "rows.h"

/* step(type) for every `row` of `rows` in parallel, with `dtype` as a constant. */
#define FOR_EACH_ROW(step)                                                                                 \
    _Pragma("omp parallel for schedule(static) if (rows > 1)") for (int64_t row = 0; row < rows; row++)    \
    {                                                                                                      \
        if (dtype == FLOAT32)                                                                              \
            step(FLOAT32);                                                                                 \
        else                                                                                               \
            step(BFLOAT16);                                                                                \
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

/* Rotary embedding of x [rows, heads, width] in place, rows `stride` elements apart: x * cos + (x with its halves
 * swapped) * sin. cos, sin: float32 [rows, width], dense; sin is negated in its first half. */
void EXPORT(rotate)(void *x, const float *cos, const float *sin, int64_t rows, int64_t stride, int64_t heads,
                     int64_t width, int64_t dtype)
{
#define ROW(type) rotate_row(at(x, row * stride, type), cos + row * width, sin + row * width, heads, width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
}

/* SwiGLU gate: activated [rows, width] = silu(gate) * up, where a row of gate_up [rows, 2 * width] is gate, then up. */
void EXPORT(gate)(const void *gate_up, void *activated, int64_t rows, int64_t width, int64_t dtype)
{
#define ROW(type) gate_row(at(gate_up, 2 * row * width, type), at(gate_up, (2 * row + 1) * width, type), \
                           at(activated, row * width, type), width, type)
    FOR_EACH_ROW(ROW)
#undef ROW
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
