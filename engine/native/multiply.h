/* Matrix products in float32, by weights packed in panels. */

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
