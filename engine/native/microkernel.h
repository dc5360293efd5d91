/* Outer products of LANES lanes in float32: what matrix products and attention are made of. */

#ifndef HEADRACE_MICROKERNEL_H
#define HEADRACE_MICROKERNEL_H

#include "simd.h"

/* Microkernel: out[i][lane] = start[i][lane] * keep[lane] + sum over k of a[i * row + k * step] * b[k][lane], for n
 * rows i and LANES lanes. Rows of out and start are out_stride elements apart; start NULL means 0. keep0, keep1:
 * factors of lanes 0-7 and 8-15. With n = 6, twelve sums, two vectors of b and a factor fill the sixteen vector
 * registers. */
INLINE void microkernel(int n, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1, const float *a,
                        int64_t row, int64_t step, const float *b, int64_t depth)
{
    vec low[6], high[6];
    for (int i = 0; i < n; i++) {
        low[i] = high[i] = splat(0);
        if (start) {
            low[i] = load(start + i * out_stride) * keep0;
            high[i] = load(start + i * out_stride + 8) * keep1;
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
        store(out + i * out_stride, low[i]);
        store(out + i * out_stride + 8, high[i]);
    }
}

/* The same for any number of rows, in evenly sized calls of at most six rows. */
INLINE void multiply_rows(int64_t rows, float *out, const float *start, int64_t out_stride, vec keep0, vec keep1,
                          const float *a, int64_t row, int64_t step, const float *b, int64_t depth)
{
    for (int64_t i = 0, turns = (rows + 5) / 6, n; turns > 0; i += n, turns--) {
        n = (rows - i + turns - 1) / turns;
        float *to = out + i * out_stride;
        const float *from = start ? start + i * out_stride : NULL, *factors = a + i * row;
        switch (n) {
        case 6: microkernel(6, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 5: microkernel(5, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 4: microkernel(4, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 3: microkernel(3, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        case 2: microkernel(2, to, from, out_stride, keep0, keep1, factors, row, step, b, depth); break;
        default: microkernel(1, to, from, out_stride, keep0, keep1, factors, row, step, b, depth);
        }
    }
}

#endif
