/* The kernels for AVX-512 with VNNI and the bfloat16 dot product (Cooper Lake, Sapphire Rapids, Zen 4 and newer). */
#if defined(__x86_64__) && !defined(PENSTOCK_WITHOUT_AVX512)
#define TARGET "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
#define LANES 16
#define HAS_VNNI 1
#define HAS_BF16 1
#define LEVEL cpu_level_avx512_bf16
#define QUANTIZED quantized_avx512
#include "cpu_kernels.h"
#endif
