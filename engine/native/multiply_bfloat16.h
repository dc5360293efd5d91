/* Products in bfloat16 by AVX512-BF16, of rows by panels of a packed weight. headrace_has_bfloat16() says whether the CPU
 * has the instructions. */

#ifndef HEADRACE_MULTIPLY_BFLOAT16_H
#define HEADRACE_MULTIPLY_BFLOAT16_H

#include <stdint.h>

/* block [panels, rows, 32] = x [rows, depth], rows `stride` elements apart, times panels of a weight packed as [panels,
 * depth / 2, 32, 2], + bias [panels, 32], unless that is NULL; all bfloat16. A sum is made in the order of the depth, by
 * pairs, whatever the number of rows and panels, and rounded once. next: the panels that are to be read after that, which
 * come into the cache meanwhile; NULL for nothing. */
void headrace_multiply_panels_bfloat16(int64_t rows, int64_t panels, void *block, const void *x, int64_t stride,
                                       const void *packed, const void *bias, int64_t depth, const void *next);

#endif
