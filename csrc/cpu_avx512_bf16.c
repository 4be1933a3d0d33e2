/* The kernels for AVX-512 with VNNI and the bfloat16 dot product (Cooper Lake, Sapphire Rapids, Zen 4 and newer). */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#endif
#define LANES 16
#define HAS_VNNI 1
#define HAS_BF16 1
#define LEVEL cpu_level_avx512_bf16
#define LEVEL_NAME "avx512_bf16"
#include "cpu_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
