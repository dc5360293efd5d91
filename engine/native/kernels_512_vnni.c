/* Matrix products in 8 bits by AVX512-VNNI. */

#if defined(__x86_64__)
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#define WIDE 16
#define EXPORT(name) headrace_##name##_512

#include "int8.h"
#endif
