/* Matrix products in float32: by weights packed in panels of LANES columns, and by weights as they are, [out, in].
 *
 * A row of a product does not depend on the number of rows beside it: all kernels add up in the same order, one fused
 * multiplication and addition at a time. */

#include "microkernel.h"

#define ROWS 128  /* of x per work item; they stay in the L2 cache while panels of the matrix are read */
#define DEPTH 576 /* elements of depth processed at a time; that part of a panel about fills the L1 cache */
#define PANELS 3  /* per work item; few enough to balance the threads */

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
                multiply_rows(count, to, from ? to : NULL, columns, splat(1), splat(1), x + row * depth + from, depth,
                              1, packed + (panel * depth + from) * LANES, now);
            }
        }
    }
}

/* ---- by rows of the weight ---------------------------------------------------------------------------------------- */

#define COLUMNS 64 /* rows of the weight per work item */
#define DOT_ROWS 4 /* rows of x at a time; with two of the weight, enough sums to hide the latency of an addition */

/* Adds elements i .. i + n of `rows` rows of x times one or two rows of the weight. */
INLINE void add_products(int rows, int columns, vec sums[DOT_ROWS][2], const float *x, const float *weight,
                         int64_t depth, int64_t i, int64_t n)
{
    const vec w0 = load_part(weight, i, n, FLOAT32), w1 = load_part(weight + (columns - 1) * depth, i, n, FLOAT32);
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        const vec factor = load_part(x + row * depth, i, n, FLOAT32);
        sums[row][0] += factor * w0;
        sums[row][1] += factor * w1;
    }
}

/* out[row * out_stride + column] = a row of x times a row of the weight. */
INLINE void dot_products(int rows, int columns, float *out, int64_t out_stride, const float *x, const float *weight,
                         int64_t depth)
{
    vec sums[DOT_ROWS][2];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
        sums[row][0] = sums[row][1] = splat(0);
    BY_VECTORS(depth, add_products(rows, columns, sums, x, weight, depth, i, n));
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            out[row * out_stride + column] = horizontal_sum(sums[row][column]);
}

/* out [rows, columns] = x [rows, depth] times the transpose of weight [columns, depth], which is not packed; all dense
 * float32. An output is summed in the same order for any number of rows and columns. */
void EXPORT(multiply_by_rows)(const float *x, const float *weight, float *out, int64_t rows, int64_t columns,
                              int64_t depth)
{
    const int64_t across = (columns + COLUMNS - 1) / COLUMNS, down = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < across * down; piece++) {
        const int64_t first = piece % across * COLUMNS, last = first + COLUMNS < columns ? first + COLUMNS : columns;
        const int64_t top = piece / across * ROWS, bottom = top + ROWS < rows ? top + ROWS : rows;
        for (int64_t row = top, n; row < bottom; row += n) {
            n = bottom - row < DOT_ROWS ? bottom - row : DOT_ROWS;
            for (int64_t column = first; column < last; column += 2) {
                float *to = out + row * columns + column;
                const float *left = x + row * depth, *right = weight + column * depth;
#define CASE(rows)                                                                                        \
    case rows:                                                                                            \
        if (column + 1 < last)                                                                            \
            dot_products(rows, 2, to, columns, left, right, depth);                                       \
        else                                                                                              \
            dot_products(rows, 1, to, columns, left, right, depth);                                       \
        break;
                switch (n) {
                    CASE(4) CASE(3) CASE(2) CASE(1)
                }
#undef CASE
            }
        }
    }
}
