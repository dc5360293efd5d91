/* What the CPU has. Compiled for any CPU of the architecture, unlike the kernels. */

/* Whether the kernels of vectors of 256 bits may be called. */
int headrace_has_256(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* Whether those of 512 bits may be called. */
int headrace_has_512(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

/* Whether headrace_multiply_int8_512 may be called. */
int headrace_has_512_vnni(void)
{
#if defined(__x86_64__)
    return headrace_has_512() && __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

/* Whether headrace_attend_bfloat16 may be called. */
int headrace_has_bfloat16(void)
{
#if defined(__x86_64__)
    return headrace_has_512() && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}
