/* Kernels of a forward pass with vectors of 256 bits: AVX2 on x86.
 *
 * Plain C with GCC's vector extension and OpenMP, called through ctypes. Shapes, strides and dtypes are checked there
 * (kernel_calls.py). The threads are torch's: both use one OpenMP runtime. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#endif

#define WIDE 8
#define EXPORT(name) headrace_##name##_256

#include "elementwise.h"
#include "multiply_by_rows.h"
#include "attention_float32.h"
#include "layer_steps.h"
#include "int8.h"
