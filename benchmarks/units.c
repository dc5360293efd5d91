/* What the vector units of one core can do: independent sums, no memory. Compiled by benchmarks.limit for the machine that
 * it runs on. Each returns the operations of `turns` turns of its loop, or 0 where the CPU has no such instruction. */

#include <stdint.h>

#define SUMS 24 /* more than the latency of an instruction times how many a cycle begins */

#if defined(__AVX512F__)
#include <immintrin.h>

#define LOOP(add)                                                   \
    __m512 sums[SUMS];                                              \
    _Pragma("GCC unroll 24")                                        \
    for (int i = 0; i < SUMS; i++)                                  \
        sums[i] = _mm512_setzero_ps();                              \
    for (int64_t turn = 0; turn < turns; turn++) {                  \
        _Pragma("GCC unroll 24")                                    \
        for (int i = 0; i < SUMS; i++) {                            \
            sums[i] = add;                                          \
            __asm__ volatile("" : "+v"(sums[i])); /* is computed */ \
        }                                                           \
    }

int64_t float32(int64_t turns)
{
    const __m512 one = _mm512_set1_ps(1);
    LOOP(_mm512_fmadd_ps(one, one, sums[i]))
    return turns * SUMS * 16 * 2;
}
#elif defined(__AVX2__) && defined(__FMA__)
typedef float vec __attribute__((vector_size(32)));

int64_t float32(int64_t turns)
{
    vec sums[SUMS / 2], one = {1, 1, 1, 1, 1, 1, 1, 1};
#pragma GCC unroll 12
    for (int i = 0; i < SUMS / 2; i++)
        sums[i] = one;
    for (int64_t turn = 0; turn < turns; turn++) {
#pragma GCC unroll 12
        for (int i = 0; i < SUMS / 2; i++) {
            sums[i] += one * one;
            __asm__ volatile("" : "+x"(sums[i])); /* is computed */
        }
    }
    return turns * SUMS / 2 * 8 * 2;
}
#else
int64_t float32(int64_t turns) { return 0 * turns; }
#endif

int64_t bfloat16(int64_t turns)
{
#if defined(__AVX512BF16__)
    const __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    LOOP(_mm512_dpbf16_ps(sums[i], one, one))
    return turns * SUMS * 32 * 2;
#else
    return 0 * turns;
#endif
}
