/* Attention in bfloat16 without AVX512-BF16: equal to the instructions bit for bit. Slow; for tests of the kernel on
 * other CPUs. */

#include "bfloat16_vectors.h"
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif

/* Not inlined: the loops of the kernel would take half a minute to compile. */
#define APART static __attribute__((noinline))

/* The instructions take subnormal numbers for 0, and make 0 of them. */
INLINE vec flushed(vec v) { return blend(((pairs)v & 0x7f800000u) != 0, v, (vec)((pairs)v & 0x80000000u)); }

/* Odd elements first and two roundings, as the instruction does it. Products of bfloat16 are exact in float32. */
APART vec dot(vec sum, pairs a, pairs b)
{
    sum = flushed(flushed(sum) + flushed((vec)(a & 0xffff0000u)) * flushed((vec)(b & 0xffff0000u)));
    return flushed(sum + flushed((vec)(a << 16)) * flushed((vec)(b << 16)));
}

APART vec fused(vec a, vec b, vec c)
{
    vec to;
    for (int i = 0; i < WIDE; i++)
        to[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return to;
}

APART vec rounded_down(vec x)
{
    vec to;
    for (int i = 0; i < WIDE; i++)
        to[i] = __builtin_floorf(x[i]);
    return to;
}

APART vec scaled(vec p, vec exponent)
{
    vec to;
    for (int i = 0; i < WIDE; i++) {
        const float by = exponent[i] < -200 ? -200 : exponent[i] > 200 ? 200 : exponent[i];
        to[i] = by == by ? __builtin_ldexpf(p[i], (int)by) : by; /* NaN stays NaN */
    }
    return to;
}

APART int any(ivec which)
{
    int found = 0;
    for (int i = 0; i < WIDE; i++)
        found |= which[i];
    return found;
}

/* A NaN of the CPU has no lower bits, and stays one. */
INLINE pairs rounded(vec v)
{
    const pairs bits = (pairs)flushed(v);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

APART pairs narrowed(vec low, vec high) { return rounded(low) | rounded(high) << 16; }

#define EXPORT(name) headrace_##name##_bfloat16_emulated
#include "attention_bfloat16.h"
