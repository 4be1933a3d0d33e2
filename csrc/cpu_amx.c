/* The kernels for AMX beside AVX-512 (Sapphire Rapids and newer). Compiled for it by pragma, whatever the flags: cpu_ops.c asks the CPU, and the kernel for leave. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
#endif
#define LANES 16
#define HAS_DOT 1
#define HAS_TILES 1
#define LEVEL cpu_level_amx
#define LEVEL_NAME "amx"
#include "cpu_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
