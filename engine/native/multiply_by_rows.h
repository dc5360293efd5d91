/* Matrix products in float32 by weights as they are, [out, in]. */

#include <omp.h>

#include "simd.h"

#define ROWS 192   /* of x per work item; they stay in the L2 cache while rows of the weight are read */
#define COLUMNS 64 /* rows of the weight per work item */
#define DOT_ROWS 4 /* rows of x at a time, */
#define DOT_SUMS 8 /* and sums: enough to hide the latency of an addition */

/* out[row * out_stride + column] = `rows` rows of x times DOT_SUMS / rows rows of the weight, of which there are `left`
 * at least; the others are not stored. */
INLINE void dot_products(int rows, int64_t left, float *out, int64_t out_stride, const float *x, const void *weight,
                         int64_t depth, int dtype)
{
    const int columns = DOT_SUMS / rows;
    const void *weights[DOT_SUMS];
    vec sums[DOT_SUMS];
#pragma GCC unroll 8
    for (int column = 0; column < columns; column++)
        weights[column] = at(weight, column < left ? column * depth : 0, dtype);
#pragma GCC unroll 8
    for (int sum = 0; sum < rows * columns; sum++)
        sums[sum] = splat(0);
#define ADD                                                                       \
    _Pragma("GCC unroll 8") for (int sum = 0; sum < rows * columns; sum++)        \
        sums[sum] += load_part(x + sum / columns * depth, i, n, FLOAT32) *        \
                     load_part(weights[sum % columns], i, n, dtype)
    BY_VECTORS(depth, ADD);
#undef ADD
#pragma GCC unroll 8
    for (int sum = 0; sum < rows * columns; sum++)
        if (sum % columns < left)
            out[sum / columns * out_stride + sum % columns] = horizontal_sum(sums[sum]);
}

INLINE void multiply_rows_by_rows(const float *x, const void *weight, float *out, int64_t rows, int64_t first,
                                  int64_t last, int64_t columns, int64_t depth, int dtype)
{
    for (int64_t row = 0, n; row < rows; row += n) {
        n = rows - row < DOT_ROWS ? rows - row : DOT_ROWS;
        for (int64_t column = first; column < last; column += DOT_SUMS / n) {
            float *to = out + row * columns + column;
            const float *left = x + row * depth;
            const void *right = at(weight, column * depth, dtype);
#define CASE(rows) \
    case rows: dot_products(rows, last - column, to, columns, left, right, depth, dtype); break;
            switch (n) {
                CASE(4) CASE(3) CASE(2) CASE(1)
            }
#undef CASE
        }
    }
}

/* out [rows, columns] = x [rows, depth] times the transpose of weight [columns, depth], which is not packed, in float32
 * or bfloat16; all dense, x and out float32. An output is summed in the same order for any number of rows and columns. */
void EXPORT(multiply_by_rows)(const float *x, const void *weight, float *out, int64_t rows, int64_t columns,
                              int64_t depth, int64_t dtype)
{
    const int64_t across = (columns + COLUMNS - 1) / COLUMNS, down = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < across * down; piece++) {
        const int64_t first = piece % across * COLUMNS, last = first + COLUMNS < columns ? first + COLUMNS : columns;
        const int64_t top = piece / across * ROWS, count = top + ROWS < rows ? ROWS : rows - top;
        if (dtype == FLOAT32)
            multiply_rows_by_rows(x + top * depth, weight, out + top * columns, count, first, last, columns, depth,
                                  FLOAT32);
        else
            multiply_rows_by_rows(x + top * depth, weight, out + top * columns, count, first, last, columns, depth,
                                  BFLOAT16);
    }
}
