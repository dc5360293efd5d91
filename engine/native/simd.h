/* Vectors of WIDE float32 by GCC's vector extension, and rows of elements in float32, bfloat16 or float16. */

#ifndef HEADRACE_SIMD_H
#define HEADRACE_SIMD_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES (2 * WIDE) /* query rows or matrix columns that are computed side by side */

typedef float vec __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
#if WIDE == 16
INLINE vec splat(float v) { return (vec){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
#else
INLINE vec splat(float v) { return (vec){v, v, v, v, v, v, v, v}; }
#endif
INLINE vec blend(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
/* If a or b is NaN, the result is b. */
#if defined(__x86_64__) && WIDE == 16
INLINE vec vec_max(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec vec_min(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec float16(const void *from) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from)); }
#elif defined(__x86_64__)
INLINE vec vec_max(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec vec_min(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec float16(const void *from) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128(from)); }
#else
typedef _Float16 float16s __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }
INLINE vec vec_min(vec a, vec b) { return blend(a < b, a, b); }
INLINE vec float16(const void *from) { return __builtin_convertvector(*(const float16s *)from, vec); }
#endif

/* By halves: each element of the lower half plus its counterpart in the upper one, until one is left. */
INLINE float horizontal_sum(vec v)
{
    for (int half = WIDE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            v[i] += v[i + half];
    return v[0];
}

INLINE float horizontal_max(vec v)
{
    for (int half = WIDE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    return v[0];
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

/* Runs step for every WIDE elements i .. i + n of a row; n is less than WIDE for the rest at its end. */
#define BY_VECTORS(width, step)                              \
    do {                                                     \
        int64_t i = 0;                                       \
        for (const int64_t n = WIDE; i + n <= width; i += n) \
            step;                                            \
        const int64_t n = width - i;                         \
        if (n)                                               \
            step;                                            \
    } while (0)

/* dtype is a constant wherever these are inlined, so the branches are resolved by the compiler. */
INLINE int64_t item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE char *at(const void *rows, int64_t index, int dtype) { return (char *)rows + index * item_bytes(dtype); }

INLINE vec load_part(const void *row, int64_t i, int64_t n, int dtype)
{
    const void *from = at(row, i, dtype);
    char last[sizeof(vec)] = {0};
    if (n < WIDE)
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
    if (n < WIDE)
        memcpy(to, dtype == FLOAT32 ? (const void *)&v : &upper, n * item_bytes(dtype));
    else if (dtype == FLOAT32)
        *(vec *)to = v;
    else
        *(halves *)to = upper;
}

/* SwiGLU: silu(gate) * up, rounded where torch rounds it. */
INLINE vec swiglu(vec gate, vec up, int dtype) { return round_to(round_to(gate * sigmoid(gate), dtype) * up, dtype); }

#endif
