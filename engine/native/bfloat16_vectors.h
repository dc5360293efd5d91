/* Vectors of 64 bytes by GCC's vector extension, for attention in bfloat16: one query in each of 16 lanes. */

#ifndef HEADRACE_BFLOAT16_VECTORS_H
#define HEADRACE_BFLOAT16_VECTORS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define WIDE 16 /* lanes of a vector */

typedef uint16_t bfloat16;
typedef float vec __attribute__((vector_size(64), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), may_alias));
typedef uint32_t pairs __attribute__((vector_size(64), may_alias)); /* of bfloat16; the first in the lower half */
typedef uint16_t halves __attribute__((vector_size(64), may_alias));

INLINE vec splat(float v) { return (vec){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
INLINE vec blend(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* Up to 32 elements of a row from element d on; zeros behind its end. */
INLINE pairs load_row(const bfloat16 *row, int64_t d, int64_t width)
{
    pairs v = {};
    memcpy(&v, row + d, width - d >= 32 ? 64 : (width - d) * sizeof(bfloat16));
    return v;
}

/* Two rows [width] as one row of pairs [width], a's elements in the lower halves. b: NULL for zeros. */
INLINE void interleave_rows(uint32_t *to, const bfloat16 *a, const bfloat16 *b, int64_t width)
{
    const halves first = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    for (int64_t d = 0; d < width; d += 32) {
        const halves x = (halves)load_row(a, d, width), y = b ? (halves)load_row(b, d, width) : (halves){};
        const halves both[2] = {__builtin_shuffle(x, y, first), __builtin_shuffle(x, y, first + 16)};
        if (width - d >= 32)
            memcpy(to + d, both, 128);
        else
            memcpy(to + d, both, (width - d) * sizeof(uint32_t));
    }
}

/* Transposes 16 x 16 words in four steps: neighbours, then blocks of 2, 4 and 8. */
INLINE void transpose(pairs r[WIDE])
{
    const ivec low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = low + 2;
    const ivec first = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, second = first + 2;
    const ivec even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
    pairs t[WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i += 2) {
        t[i] = __builtin_shuffle(r[i], r[i + 1], (pairs)low);
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], (pairs)high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i += 4) {
        r[i] = __builtin_shuffle(t[i], t[i + 2], (pairs)first);
        r[i + 1] = __builtin_shuffle(t[i], t[i + 2], (pairs)second);
        r[i + 2] = __builtin_shuffle(t[i + 1], t[i + 3], (pairs)first);
        r[i + 3] = __builtin_shuffle(t[i + 1], t[i + 3], (pairs)second);
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) {
        const int j = i / 8 * 8 + i % 4;
        t[i] = __builtin_shuffle(r[j], r[j + 4], (pairs)(i & 4 ? odd : even));
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        r[i] = __builtin_shuffle(t[i % 8], t[i % 8 + 8], (pairs)(i & 8 ? odd : even));
}

#endif
