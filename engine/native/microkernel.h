/* Outer products of LANES lanes in float32: what matrix products and attention are made of. */

#ifndef HEADRACE_MICROKERNEL_H
#define HEADRACE_MICROKERNEL_H

#include "simd.h"

#define MOST_ROWS (WIDE == 16 ? 12 : 6)
#define CACHE_LINE (64 / (int64_t)sizeof(float)) /* elements */

/* Microkernel: out[i][lane] = start[i][lane] * keep[lane] + sum over k of a[i * row + k * step] * b[k][lane], for n
 * rows i and LANES lanes. Rows of out and start are out_stride elements apart; start NULL means 0. keep0, keep1:
 * factors of the first and second WIDE lanes. next: as much as b that comes into the L2 cache meanwhile, or NULL. With n =
 * MOST_ROWS, the sums, two vectors of b and a factor fill the vector registers: 16 of 256 bits, 32 of 512. */
INLINE void microkernel(int n, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1, const float *a,
                        int64_t row, int64_t step, const float *b, int64_t depth, const float *next)
{
    vec low[MOST_ROWS], high[MOST_ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) {
        low[i] = high[i] = splat(0);
        if (start) {
            low[i] = load(start + i * out_stride) * keep0;
            high[i] = load(start + i * out_stride + WIDE) * keep1;
        }
    }
    for (int64_t k = 0; k < depth; k++) {
        vec b0 = load(b + k * LANES), b1 = load(b + k * LANES + WIDE);
        if (next)
            for (int64_t line = 0; line < LANES; line += CACHE_LINE)
                __builtin_prefetch(next + k * LANES + line, 0, 2);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++) {
            vec factor = splat(a[i * row + k * step]);
            low[i] += factor * b0;
            high[i] += factor * b1;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) {
        store(out + i * out_stride, low[i]);
        store(out + i * out_stride + WIDE, high[i]);
    }
}

/* The same for any number of rows, in evenly sized calls of at most MOST_ROWS rows. next: what is to be read like b after
 * that, which comes into the cache meanwhile; NULL for nothing. */
INLINE void multiply_rows(int64_t rows, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1,
                          const float *a, int64_t row, int64_t step, const float *b, int64_t depth, const float *next)
{
    for (int64_t i = 0, turns = (rows + MOST_ROWS - 1) / MOST_ROWS, n; turns > 0; i += n, turns--) {
        n = (rows - i + turns - 1) / turns;
        float *to = out + i * out_stride;
        const float *from = start ? start + i * out_stride : NULL, *factors = a + i * row;
        const float *then = next && turns == 1 ? next : NULL;
#define CASE(rows) \
    case rows: microkernel(rows, to, from, out_stride, keep0, keep1, factors, row, step, b, depth, then); break;
        switch (n) {
#if WIDE == 16
            CASE(12) CASE(11) CASE(10) CASE(9) CASE(8) CASE(7)
#endif
            CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
        }
#undef CASE
    }
}

#endif
