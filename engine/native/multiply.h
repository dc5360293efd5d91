/* Matrix products in float32: by weights packed in panels of LANES columns, and by weights as they are, [out, in].
 *
 * A row of a product does not depend on the number of rows beside it: all kernels add up in the same order, one fused
 * multiplication and addition at a time. While a panel is multiplied, the one that the same thread is likely to get next
 * comes into its cache. */

#include <omp.h>

#include "microkernel.h"

#define ROWS 192             /* of x per work item; they stay in the L2 cache while panels of the matrix are read */
#define DEPTH (9216 / LANES) /* elements of depth processed at a time; that part of a panel about fills the L1 cache */
#define PANELS 3             /* per work item; few enough to balance the threads */

/* out [rows, columns] = x [rows, depth] times a matrix packed as [columns / LANES, depth, LANES]; all dense float32. A
 * work item is PANELS panels of the matrix times ROWS rows of x. */
void EXPORT(multiply)(const float *x, const float *packed, float *out, int64_t rows, int64_t columns, int64_t depth)
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
                const int64_t piece_after = last + (omp_get_num_threads() - 1) * PANELS;
                const int64_t after = panel + 1 < last ? panel + 1 : from + now < depth ? first : piece_after;
                const int64_t then = panel + 1 < last ? from : (from + now) % depth;
                multiply_rows(count, to, from ? to : NULL, columns, splat(1), splat(1), x + row * depth + from, depth,
                              1, packed + (panel * depth + from) * LANES, now,
                              after < panels ? packed + (after * depth + then) * LANES : NULL);
            }
        }
    }
}

/* out [rows, width] = silu(gate) * up, where gate and up are the halves of x [rows, depth] times a matrix of 2 * width
 * columns, packed as multiply() takes it. width: a multiple of LANES. They are not written to memory. */
void EXPORT(multiply_gate)(const float *x, const float *packed, float *out, int64_t rows, int64_t width, int64_t depth)
{
    const int64_t panels = width / LANES, down = (rows + ROWS - 1) / ROWS;
    const int64_t turns = (depth + DEPTH - 1) / DEPTH, at_once = (depth + turns - 1) / turns;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < panels * down; piece++) {
        const int64_t panel = piece % panels, row = piece / panels * ROWS, count = row + ROWS < rows ? ROWS : rows - row;
        float halves[2][ROWS * LANES] __attribute__((aligned(64)));
        for (int64_t from = 0; from < depth; from += at_once) {
            const int64_t now = from + at_once < depth ? at_once : depth - from;
            for (int half = 0; half < 2; half++) {
                const int64_t piece_after = from + now < depth ? panel : panel + omp_get_num_threads();
                const int64_t after = half ? piece_after : panels + panel, then = half ? (from + now) % depth : from;
                multiply_rows(count, halves[half], from ? halves[half] : NULL, LANES, splat(1), splat(1),
                              x + row * depth + from, depth, 1,
                              packed + ((half * panels + panel) * depth + from) * LANES, now,
                              half && after >= panels ? NULL : packed + (after * depth + then) * LANES);
            }
        }
        for (int64_t i = 0; i < count; i++)
            for (int side = 0; side < LANES; side += WIDE)
                store(out + (row + i) * width + panel * LANES + side,
                      swiglu(load(halves[0] + i * LANES + side), load(halves[1] + i * LANES + side), FLOAT32));
    }
}

/* ---- by rows of the weight ---------------------------------------------------------------------------------------- */

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
