/* The kernels without any assumption about the machine: SSE2 on x86-64, NEON on aarch64, plain C elsewhere. */
#define LANES 4
#define HAS_DOT 0
#define HAS_TILES 0
#define LEVEL cpu_level_portable
#define LEVEL_NAME "portable"
#include "cpu_kernels.h"
