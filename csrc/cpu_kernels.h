/* All code that is compiled once per instruction level, and the table of its functions. The source file of a level sets
 * LANES, HAS_VNNI, HAS_BF16, LEVEL and QUANTIZED and includes this file. A pragma selects the instructions
 * in TARGET, whatever the compiler's flags are; cpu_ops.c asks the CPU for them at run time. */
#if defined(TARGET)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define SELECT(target_name) PRAGMA(clang attribute push(__attribute__((target(target_name))), apply_to = function))
#else
#define SELECT(target_name) PRAGMA(GCC target(target_name))
#endif
SELECT(TARGET)
#endif

#include "cpu_vector.h" /* first: the others use it */
#include "cpu_rows.h"
#include "cpu_product.h"
#include "cpu_tile.h"
#include "cpu_attention.h"
#include "cpu_linear.h"

#if LANES > 4 && !HAS_BF16
#include "cpu_quantized.h"
#endif

#include <math.h>

#define RUN 16            /* tokens applied to a block of the state while it is in the cache */
#define PENSTOCK_HEAD 256 /* largest head dimension: see executor/kernels/recurrent.py */
#include "cpu_recurrent.h"

const struct cpu_level LEVEL = {
    .norm = {norm_float32, norm_bfloat16},
    .gate = {{silu_float32, silu_bfloat16},
             {gelu_float32, gelu_bfloat16},
             {clamped_float32, clamped_bfloat16},
             {sigmoid_float32, sigmoid_bfloat16}},
    .rope = {rope_float32, rope_bfloat16},
    .attend = {attend_float32, attend_bfloat16},
    .combine = {combine_float32, combine_bfloat16},
    .scratch_bytes = scratch_bytes,
    .linear = {linear_float32, linear_bfloat16},
    .columns = COLUMNS,
#if LANES > 4
    .quantized = &QUANTIZED,
#endif
    .convolve = {convolve_float32, convolve_bfloat16},
    .delta = {delta_float32, delta_bfloat16},
};

#if defined(TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
