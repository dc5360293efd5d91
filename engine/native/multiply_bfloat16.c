/* See multiply_bfloat16.h. */

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "bfloat16_vectors.h"
#include "multiply_bfloat16.h"

#define LANES (2 * WIDE) /* columns of a panel */
#define MOST_ROWS 12     /* 24 sums, two vectors of the panel and a pair of x are registers; there are 32 */
#define AT_ONCE 4        /* panels that few rows are multiplied with: at least 6 sums hide the latency of the instruction */

INLINE vec dot(vec sum, pairs a, pairs b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

/* 16 elements as float32. */
INLINE vec widened(const bfloat16 *from)
{
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

/* n rows times m panels; a panel of the weight is depth * LANES / 2 pairs, one of the block rows * LANES sums. next,
 * if `ahead`: a panel that comes into the L2 cache meanwhile. */
INLINE void microkernel(const int n, const int m, const int ahead, bfloat16 *block, int64_t rows, const bfloat16 *x,
                        int64_t stride, const uint32_t *packed, const bfloat16 *bias, int64_t depth,
                        const uint32_t *next)
{
    vec sums[AT_ONCE * 2 * MOST_ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * n * m; i++)
        sums[i] = splat(0);
    for (int64_t k = 0; k < depth / 2; k++) {
        pairs columns[2 * AT_ONCE];
        if (ahead) {
            __builtin_prefetch(next + k * LANES, 0, 2);
            __builtin_prefetch(next + k * LANES + WIDE, 0, 2);
        }
#pragma GCC unroll 8
        for (int v = 0; v < 2 * m; v++)
            columns[v] = *(const pairs *)(packed + v / 2 * (depth / 2) * LANES + k * LANES + v % 2 * WIDE);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++) {
            const pairs pair = (pairs){} + *(const uint32_t *)(x + i * stride + 2 * k);
#pragma GCC unroll 8
            for (int v = 0; v < 2 * m; v++)
                sums[i * 2 * m + v] = dot(sums[i * 2 * m + v], pair, columns[v]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < n * m; i++) {
        vec low = sums[2 * i], high = sums[2 * i + 1];
        if (bias) {
            low += widened(bias + i % m * LANES);
            high += widened(bias + i % m * LANES + WIDE);
        }
        _mm512_storeu_si512(block + (i % m * rows + i / m) * LANES,
                            (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

/* Not inlined: the loops are compiled once. */
#define KERNEL(n, m)                                                                                             \
    static __attribute__((noinline)) void rows_##n##_panels_##m(bfloat16 *block, int64_t rows, const bfloat16 *x, \
                                                                int64_t stride, const uint32_t *packed,          \
                                                                const bfloat16 *bias, int64_t depth,             \
                                                                const uint32_t *next)                            \
    {                                                                                                            \
        if (m == 1 && next)                                                                                      \
            microkernel(n, m, 1, block, rows, x, stride, packed, bias, depth, next);                             \
        else                                                                                                     \
            microkernel(n, m, 0, block, rows, x, stride, packed, bias, depth, NULL);                             \
    }
KERNEL(1, 4) KERNEL(2, 2) KERNEL(3, 2)
KERNEL(1, 1) KERNEL(2, 1) KERNEL(3, 1) KERNEL(4, 1) KERNEL(5, 1) KERNEL(6, 1)
KERNEL(7, 1) KERNEL(8, 1) KERNEL(9, 1) KERNEL(10, 1) KERNEL(11, 1) KERNEL(12, 1)
#undef KERNEL

typedef void kernel(bfloat16 *, int64_t, const bfloat16 *, int64_t, const uint32_t *, const bfloat16 *, int64_t,
                    const uint32_t *);

void headrace_multiply_panels_bfloat16(int64_t rows, int64_t panels, void *block, const void *x, int64_t stride,
                                       const void *packed, const void *bias, int64_t depth, const void *next)
{
    static kernel *const one_panel[] = {
        NULL,
        rows_1_panels_1, rows_2_panels_1, rows_3_panels_1, rows_4_panels_1,  rows_5_panels_1,  rows_6_panels_1,
        rows_7_panels_1, rows_8_panels_1, rows_9_panels_1, rows_10_panels_1, rows_11_panels_1, rows_12_panels_1,
    };
    static kernel *const several[] = {NULL, rows_1_panels_4, rows_2_panels_2, rows_3_panels_2};
    const int64_t at_once = rows == 1 ? AT_ONCE : rows <= 3 ? AT_ONCE / 2 : 1, size = depth / 2 * LANES;
    const int64_t turns = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t panel = 0, m; panel < panels; panel += m) {
        m = panels - panel < at_once ? 1 : at_once;
        const uint32_t *columns = (const uint32_t *)packed + panel * size;
        const uint32_t *then = panel + m < panels ? columns + m * size : next;
        const bfloat16 *added = bias ? (const bfloat16 *)bias + panel * LANES : NULL;
        for (int64_t i = 0, left = turns, n; left > 0; i += n, left--) {
            n = (rows - i + left - 1) / left;
            (m > 1 ? several : one_panel)[n]((bfloat16 *)block + (panel * rows + i) * LANES, rows,
                                             (const bfloat16 *)x + i * stride, stride, columns, added, depth,
                                             left == 1 ? then : NULL);
        }
    }
}
#endif
