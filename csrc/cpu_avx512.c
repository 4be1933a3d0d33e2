/* The kernels for AVX-512 as of Skylake-SP. Compiled for it by pragma, whatever the flags: cpu_ops.c asks the CPU. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LANES 16
#define HAS_DOT 0
#define HAS_TILES 0
#define LEVEL cpu_level_avx512
#define LEVEL_NAME "avx512"
#include "cpu_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
