/* The kernels without any assumption about the machine: SSE2 on x86-64, NEON on aarch64, plain C elsewhere.
 * Weights are not kept as codes here (executor/code_types.py): numbers in float32 are faster without vectors. */
#define LANES 4
#define HAS_VNNI 0
#define HAS_BF16 0
#define LEVEL cpu_level_portable
#include "cpu_kernels.h"
