/* Vectors of 8 float32 by GCC's vector extension (AVX2 on x86), and rows of elements in float32, bfloat16 or float16. */

#ifndef HEADRACE_SIMD_H
#define HEADRACE_SIMD_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* query rows or matrix columns that are computed side by side: two vectors */

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec splat(float v) { return (vec){v, v, v, v, v, v, v, v}; }
INLINE vec blend(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
#if defined(__x86_64__)
/* If a or b is NaN, the result is b. */
INLINE vec vec_max(vec a, vec b) { return (vec)__builtin_ia32_maxps256(a, b); }
INLINE vec vec_min(vec a, vec b) { return (vec)__builtin_ia32_minps256(a, b); }
#else
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }
INLINE vec vec_min(vec a, vec b) { return blend(a < b, a, b); }
#endif

INLINE float horizontal_sum(vec v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* 2 to the power of x for x < 128; infinity at 128, 0 below the smallest normal number, NaN for NaN. Range reduction to
 * [-1/2, 1/2], a Taylor polynomial of degree 7 (error below one unit in the last place), times a power of two set in the
 * exponent bits. */
INLINE vec exp2_approx(vec x)
{
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec clamped = vec_max(splat(-127.0f), x);
    vec shifted = clamped + magic;
    vec f = clamped - (shifted - magic);
    vec p = splat(1.5252733804e-5f);
    p = p * f + 1.5403530393e-4f;
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    ivec scale = ((ivec)shifted + 127) << 23; /* the integer is in the low bits; -127 gives the exponent of 0 */
    return p * (vec)scale;
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp2_approx(vec_min(x * -1.4426950408889634f, splat(128)))); }

/* Runs step for every eight elements i .. i + n of a row; n is less than eight for the rest at its end. */
#define BY_EIGHTS(width, step)                            \
    do {                                                  \
        int64_t i = 0;                                    \
        for (const int64_t n = 8; i + n <= width; i += n) \
            step;                                         \
        const int64_t n = width - i;                      \
        if (n)                                            \
            step;                                         \
    } while (0)

/* dtype is a constant wherever these are inlined, so the branches are resolved by the compiler. */
INLINE int64_t item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE char *at(const void *rows, int64_t index, int dtype) { return (char *)rows + index * item_bytes(dtype); }

#if defined(__x86_64__)
typedef short shorts __attribute__((vector_size(16), aligned(2), may_alias));
INLINE vec float16(const void *from) { return (vec)__builtin_ia32_vcvtph2ps256(*(const shorts *)from); }
#else
typedef _Float16 float16s __attribute__((vector_size(16), aligned(2), may_alias));
INLINE vec float16(const void *from) { return __builtin_convertvector(*(const float16s *)from, vec); }
#endif

INLINE vec load_part(const void *row, int64_t i, int64_t n, int dtype)
{
    const void *from = at(row, i, dtype);
    char last[32] = {0};
    if (n < 8)
        from = memcpy(last, from, n * item_bytes(dtype));
    if (dtype == FLOAT32)
        return *(const vec *)from;
    if (dtype == BFLOAT16)
        return (vec)(__builtin_convertvector(*(const halves *)from, uvec) << 16);
    return float16(from);
}

/* Rounds to bfloat16 precision, to nearest even; the result is a float32 whose lower half is zero. NaN stays NaN: those
 * of 16 bits, and those that the CPU generates, have a lower half of zeros, too. */
INLINE vec round_to(vec v, int dtype)
{
    uvec bits = (uvec)v;
    return dtype == FLOAT32 ? v : (vec)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

/* Stores n elements: v as float32, or the upper halves of v, which is rounded already, as bfloat16. */
INLINE void store_part(void *row, int64_t i, int64_t n, vec v, int dtype)
{
    char *to = at(row, i, dtype);
    halves upper = __builtin_convertvector((uvec)v >> 16, halves);
    if (n < 8)
        memcpy(to, dtype == FLOAT32 ? (const void *)&v : &upper, n * item_bytes(dtype));
    else if (dtype == FLOAT32)
        *(vec *)to = v;
    else
        *(halves *)to = upper;
}

#endif
