/* The vector operations of one instruction level, used by all kernels (cpu_rows.h, cpu_attention.h, …).
 *
 * The source file of each level includes this file after it has switched the compiler to the level and set
 *   LANES     floats in a vector (4, 8, 16)
 *   HAS_VNNI  1 where one instruction multiplies and sums four pairs of bytes, or two of 16 bits, in a 32-bit lane
 *   HAS_BF16  1 where one instruction multiplies and sums the pairs of bfloat16 in a 32-bit lane
 * Fused multiply-adds are explicit, never left to the compiler, so that a level computes the same bits everywhere. */
#include <stdint.h>
#include <string.h>

#include "cpu_level.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Define `name`_float32 and `name`_bfloat16 for the level's table: they call `run` with the arguments and the type. */
#define RANGE_PARAMETERS (const void *op, int64_t first, int64_t end, int thread) /* those of `range_function` */
#define IN_BOTH_TYPES(name, run, parameters, ...)                         \
    static void name##_float32 parameters { run(__VA_ARGS__, FLOAT32); }  \
    static void name##_bfloat16 parameters { run(__VA_ARGS__, BFLOAT16); }

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES))); /* LANES bfloat16 */
typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));  /* 2 LANES bfloat16, or LANES pairs of them */

#if LANES == 16
#define LANE_INDEX {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define LANE_INDEX {0, 1, 2, 3, 4, 5, 6, 7}
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LANE_INDEX {0, 1, 2, 3}
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

#if HAS_BF16
/* c plus, in every lane, the two products of the pairs of bfloat16 in a and b. */
INLINE vec multiply_add_pairs(vec a, vec b, vec c) {
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

#define ZIP_LOW_HALVES(a, b)                                                                                      \
    __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, \
                            43, 12, 44, 13, 45, 14, 46, 15, 47)
#define ZIP_HIGH_HALVES(a, b)                                                                                        \
    __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, \
                            58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)
#else
INLINE vec multiply_add_pairs(vec a, vec b, vec c) {
    const uvec upper = (uvec){0} + 0xffff0000u;
    c = multiply_add((vec)((uvec)a << 16), (vec)((uvec)b << 16), c);
    return multiply_add((vec)((uvec)a & upper), (vec)((uvec)b & upper), c);
}
#define ZIP_LOW_HALVES(a, b) (a) /* never reached: attention has no pairs here */
#define ZIP_HIGH_HALVES(a, b) (b)
#endif

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE vec larger(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* Add the upper half of the lanes to the lower half until one is left, so the order of a sum depends only on LANES. */
INLINE float sum_lanes(vec x) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lane[LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

INLINE float largest_lane(vec x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
#endif
}

/* Return 2^x with a relative error of 1e-7 for x <= 126; 0 for x < -126, including minus infinity; NaN for NaN. */
INLINE vec power_of_two(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec is_tiny = x < splat(-126.0f);
    x = choose(is_tiny, splat(-126.0f), x);
    vec shifted = x + magic, rest = x - (shifted - magic);
    vec y = splat(POWER_6);
    y = multiply_add(y, rest, splat(POWER_5));
    y = multiply_add(y, rest, splat(POWER_4));
    y = multiply_add(y, rest, splat(POWER_3));
    y = multiply_add(y, rest, splat(POWER_2));
    y = multiply_add(y, rest, splat(POWER_1));
    y = multiply_add(y, rest, splat(POWER_0));
    /* the integer is in the low bits of `shifted`; the shift discards the other bits */
    return (vec)(((ivec)y + (ivec)((uvec)shifted << 23)) & ~is_tiny);
}

/* bfloat16 and float32 in memory. `type` is always a compile-time constant. */

INLINE vec widen(halves x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE halves narrow(vec x) { /* round to nearest even; NaN stays NaN */
#if HAS_BF16
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uvec is_nan = (uvec)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
}

INLINE const void *element_at(const void *base, int64_t index, enum element type) {
    return (const char *)base + index * (type == BFLOAT16 ? 2 : 4);
}

INLINE float load_scalar(const void *base, int64_t index, enum element type) {
    if (type == FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float x;
    return memcpy(&x, &bits, sizeof x), x;
}

/* Load LANES elements from `index` on, of which `left` exist; the others are 0. */
INLINE vec load(const void *base, int64_t index, int64_t left, enum element type) {
    const void *from = element_at(base, index, type);
    if (type == FLOAT32) {
        vec whole, some = {0};
        if (left >= LANES) return memcpy(&whole, from, sizeof whole), whole;
        return memcpy(&some, from, 4 * left), some;
    }
    halves whole, some = {0};
    if (left >= LANES) return memcpy(&whole, from, sizeof whole), widen(whole);
    return memcpy(&some, from, 2 * left), widen(some);
}

INLINE void store(void *base, int64_t index, int64_t left, vec x, enum element type) {
    void *to = (void *)element_at(base, index, type);
    if (type == FLOAT32) {
        vec some = x;
        if (left >= LANES) memcpy(to, &x, sizeof x);
        else memcpy(to, &some, 4 * left);
        return;
    }
    halves whole = narrow(x), some = whole;
    if (left >= LANES) memcpy(to, &whole, sizeof whole);
    else memcpy(to, &some, 2 * left);
}

/* Round x as storing and loading it would. */
INLINE vec rounded(vec x, enum element type) { return type == BFLOAT16 ? widen(narrow(x)) : x; }
