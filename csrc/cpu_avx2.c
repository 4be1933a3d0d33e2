/* The kernels for AVX2, FMA and F16C (Haswell, Zen and newer).
 * A pragma selects the instructions, whatever the compiler's flags are; cpu_ops.c asks the CPU for them at run time. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define LANES 8
#define HAS_VNNI 0
#define HAS_BF16 0
#define LEVEL cpu_level_avx2
#define LEVEL_NAME "avx2"
#include "cpu_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
