/* The kernels for AVX2, FMA and F16C (Haswell, Zen and newer). */
#if defined(__x86_64__)
#define TARGET "avx2,fma,f16c"
#define LANES 8
#define HAS_VNNI 0
#define HAS_BF16 0
#define LEVEL cpu_level_avx2
#define QUANTIZED quantized_avx2
#include "cpu_kernels.h"
#endif
