/* The kernels for AVX-512 with the integer dot product, VNNI (Cascade Lake, Ice Lake and newer). */
#if defined(__x86_64__) && !defined(PENSTOCK_WITHOUT_AVX512)
#define TARGET "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define LANES 16
#define HAS_VNNI 1
#define HAS_BF16 0
#define LEVEL cpu_level_avx512
#define QUANTIZED quantized_avx512
#include "cpu_kernels.h"
#endif
