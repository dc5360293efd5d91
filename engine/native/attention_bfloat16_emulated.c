/* Attention in bfloat16 without AVX512-BF16: equal to the instructions bit for bit but for subnormal numbers, which they
 * take for 0. Slow; for tests of the kernel on other CPUs. */

#include "bfloat16_vectors.h"
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif

/* Odd elements first and two roundings, as the instruction does it. Products of bfloat16 are exact in float32. */
INLINE vec dot(vec sum, pairs a, pairs b)
{
    sum += (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
    return sum + (vec)(a << 16) * (vec)(b << 16);
}

INLINE vec fused(vec a, vec b, vec c)
{
    vec to;
    for (int i = 0; i < WIDE; i++)
        to[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return to;
}

INLINE vec rounded_down(vec x)
{
    vec to;
    for (int i = 0; i < WIDE; i++)
        to[i] = __builtin_floorf(x[i]);
    return to;
}

INLINE vec scaled(vec p, vec exponent)
{
    vec to;
    for (int i = 0; i < WIDE; i++) {
        const float by = exponent[i] < -200 ? -200 : exponent[i] > 200 ? 200 : exponent[i];
        to[i] = by == by ? __builtin_ldexpf(p[i], (int)by) : by; /* NaN stays NaN */
    }
    return to;
}

INLINE int any(ivec which)
{
    int found = 0;
    for (int i = 0; i < WIDE; i++)
        found |= which[i];
    return found;
}

/* A NaN of the CPU has no lower bits, and stays one. */
INLINE pairs round_up_half(vec v)
{
    const pairs bits = (pairs)v;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE pairs narrowed(vec low, vec high) { return round_up_half(low) | round_up_half(high) << 16; }

#define ATTEND headrace_attend_bfloat16_emulated
#include "attention_bfloat16.h"
