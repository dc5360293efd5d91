/* Products of a tile of rows by a packed weight, and what comes then: in float32, in bfloat16 where LANES is 32, and in 8
 * bits.
 *
 * A panel of the weight at a time is multiplied with all rows of the tile, into a block of sums that stays in the L1 cache.
 * A sum is made in the order of the depth, whatever the number of rows beside it. */

#ifndef HEADRACE_MULTIPLY_TILE_H
#define HEADRACE_MULTIPLY_TILE_H

#include <omp.h>

#include "microkernel.h"
#include "multiply_bfloat16.h"
#include "multiply_int8.h"

#if WIDE == 16 && defined(__x86_64__)
#define HAS_BFLOAT16 1
#else
#define HAS_BFLOAT16 0
#endif
#define TILE_ROWS 64         /* of x per work item; they stay in the L2 cache while panels of the matrix are read */
#define FEW 3                /* rows in bfloat16 that are multiplied with several panels at a time */
#define AT_ONCE 4            /* such panels */
#define BLOCKS(rows) (2 * LANES * (rows > FEW * AT_ONCE ? rows : FEW * AT_ONCE)) /* elements, of a tile */

enum then { STORE, ADD, GATE };

/* A product of rows x [rows, depth], `stride` elements apart, by a weight that is packed as [panels, depth, LANES], or in
 * bfloat16 as multiply_bfloat16.h says; for GATE two such weights, one after the other. */
struct product {
    const void *x, *packed;
    const void *bias; /* [panels * LANES], or NULL */
    void *to;         /* [rows, panels * LANES], to_stride elements apart */
    int64_t stride, to_stride, rows, panels, depth;
    int64_t int8; /* x is struct int8_rows, packed is struct int8_matrix, of whole panels; bias in float32 */
};

/* blocks [panels, rows, LANES] = x times some panels from `panel` on, + their bias, rounded. next: the panel that is read
 * after that, which comes into the cache meanwhile. */
INLINE void multiply_panels(const int dtype, const struct product *of, int64_t panel, int64_t panels, void *blocks,
                            int64_t next)
{
    if (of->int8) {
        const float *bias = of->bias ? (const float *)of->bias + panel * LANES : NULL;
        EXPORT(multiply_rows_int8)(of->packed, panel, of->rows, *(const struct int8_rows *)of->x, bias, blocks, LANES, dtype);
        return;
    }
    const int64_t depth = of->depth;
    (void)panels; /* 1 in float32 */
    const void *own = at(of->packed, panel * depth * LANES, dtype), *then = at(of->packed, next * depth * LANES, dtype);
    const void *bias = of->bias ? at(of->bias, panel * LANES, dtype) : NULL;
#if HAS_BFLOAT16
    if (dtype == BFLOAT16) {
        headrace_multiply_panels_bfloat16(of->rows, panels, blocks, of->x, of->stride, own, bias, depth, then);
        return;
    }
#endif
    multiply_rows(of->rows, blocks, NULL, LANES, splat(1), splat(1), of->x, of->stride, 1, own, depth, then);
    for (int64_t i = 0; bias && i < of->rows * LANES; i += WIDE)
        store((float *)blocks + i, load((float *)blocks + i) + load((const float *)bias + i % LANES));
}

/* Panels [first, last) of a product. STORE: to = x @ packed + bias. ADD: to += that. GATE: to = silu(x @ packed) * (x @
 * the second weight). blocks: BLOCKS(rows) elements, working memory. */
INLINE void multiply_tile(const int dtype, const enum then then, const struct product *of, int64_t first, int64_t last,
                          void *blocks)
{
    const int64_t rows = of->rows, at_once = dtype == BFLOAT16 && !of->int8 && rows <= FEW ? AT_ONCE : 1;
    for (int64_t panel = first, n; panel < last; panel += n) {
        n = last - panel < at_once ? last - panel : at_once;
        const int64_t second = of->panels + panel, next = panel + n < last ? panel + n : first;
        void *others = at(blocks, n * rows * LANES, dtype);
        multiply_panels(dtype, of, panel, n, blocks, then == GATE ? second : next);
        if (then == GATE)
            multiply_panels(dtype, of, second, n, others, next);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t lane = 0; lane < n * LANES; lane += WIDE) {
                const int64_t sum = (lane / LANES * rows + row) * LANES + lane % LANES;
                void *to = at(of->to, row * of->to_stride + panel * LANES + lane, dtype);
                vec v = load_part(blocks, sum, WIDE, dtype);
                if (then == ADD)
                    v = round_to(load_part(to, 0, WIDE, dtype) + v, dtype);
                if (then == GATE)
                    v = swiglu(v, load_part(others, sum, WIDE, dtype), dtype);
                store_part(to, 0, WIDE, v, dtype);
            }
    }
}

/* The rows of a product from `row` on, TILE_ROWS of them at most. */
INLINE struct product rows_from(const int dtype, const struct product *whole, int64_t row)
{
    struct product part = *whole;
    part.x = at(whole->x, row * whole->stride, dtype);
    part.to = at(whole->to, row * whole->to_stride, dtype);
    part.rows = whole->rows - row < TILE_ROWS ? whole->rows - row : TILE_ROWS;
    return part;
}

/* The whole of a product on all threads. A work item is some panels times TILE_ROWS rows. */
INLINE void multiply_all(const int dtype, const enum then then, const struct product *whole)
{
    const int64_t down = (whole->rows + TILE_ROWS - 1) / TILE_ROWS, each = AT_ONCE;
    const int64_t across = (whole->panels + each - 1) / each;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < across * down; piece++) {
        float blocks[BLOCKS(TILE_ROWS)] __attribute__((aligned(64)));
        const int64_t first = piece % across * each;
        const struct product part = rows_from(dtype, whole, piece / across * TILE_ROWS);
        multiply_tile(dtype, then, &part, first, first + each < whole->panels ? first + each : whole->panels, blocks);
    }
}

/* out [rows, columns] = x [rows, depth] times a packed weight + bias, unless that is NULL. gate: of twice as many columns,
 * silu(first half) * second half. All dense. columns: a multiple of LANES. */
#define MULTIPLY(name, dtype)                                                                                         \
    void EXPORT(name)(const void *x, const void *packed, const void *bias, void *out, int64_t rows, int64_t columns, \
                      int64_t depth, int64_t gate)                                                                    \
    {                                                                                                                 \
        const struct product whole = {x, packed, bias, out, depth, columns, rows, columns / LANES, depth, 0};         \
        if (gate)                                                                                                     \
            multiply_all(dtype, GATE, &whole);                                                                        \
        else                                                                                                          \
            multiply_all(dtype, STORE, &whole);                                                                       \
    }

MULTIPLY(multiply_float32, FLOAT32)
#if HAS_BFLOAT16
MULTIPLY(multiply_bfloat16, BFLOAT16)
#endif

#endif
