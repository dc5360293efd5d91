/* Attention in bfloat16 by the instructions of AVX512-BF16. headrace_has_bfloat16() says whether the CPU has them. */

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "bfloat16_vectors.h"

INLINE vec dot(vec sum, pairs a, pairs b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

INLINE vec rounded_down(vec x)
{
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

INLINE vec scaled(vec p, vec exponent) { return (vec)_mm512_scalef_ps((__m512)p, (__m512)exponent); }

INLINE int any(ivec which) { return _mm512_movepi32_mask((__m512i)which) != 0; }

INLINE pairs narrowed(vec low, vec high)
{
    static const halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (pairs)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#define EXPORT(name) headrace_##name##_bfloat16
#include "attention_bfloat16.h"
#endif
