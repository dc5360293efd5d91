/* Kernels of a forward pass with vectors of 512 bits: AVX-512. See kernels_256.c. */

#if defined(__x86_64__)
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#define WIDE 16
#define EXPORT(name) headrace_##name##_512

#include "elementwise.h"
#include "multiply_by_rows.h"
#include "attention_float32.h"
#include "layer_steps.h"
#endif
