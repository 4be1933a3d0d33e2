/* The tiles of AMX in plain C, put before every source of csrc/ (tests/executor/test_tiles.py): so that what is written for
 * them is tested on any CPU with AVX-512. As Intel describes the instructions, for one thread's tiles. */
#ifndef TILES_IN_C
#define TILES_IN_C
#include <assert.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#pragma GCC push_options
#pragma GCC optimize("O3")
struct shapes_in_c {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
struct tile_in_c {
    char row[16][64];
};
static __thread struct shapes_in_c shapes_in_c;
static __thread struct tile_in_c tiles_in_c[8];

static inline void shapes_into_c(const void *from) {
    memcpy(&shapes_in_c, from, sizeof shapes_in_c);
    assert(shapes_in_c.palette == 1);
    for (int t = 0; t < 8; t++) assert(shapes_in_c.rows[t] <= 16 && shapes_in_c.row_bytes[t] <= 64);
    memset(tiles_in_c, 0, sizeof tiles_in_c);
}
static inline void is_shaped(int t) { assert(shapes_in_c.palette == 1 && shapes_in_c.rows[t] && shapes_in_c.row_bytes[t]); }
static inline void load_in_c(int t, const void *from, int64_t stride) {
    is_shaped(t);
    memset(&tiles_in_c[t], 0, sizeof *tiles_in_c);
    for (int r = 0; r < shapes_in_c.rows[t]; r++)
        memcpy(tiles_in_c[t].row[r], (const char *)from + r * stride, shapes_in_c.row_bytes[t]);
}
static inline void store_in_c(int t, void *to, int64_t stride) {
    is_shaped(t);
    for (int r = 0; r < shapes_in_c.rows[t]; r++)
        memcpy((char *)to + r * stride, tiles_in_c[t].row[r], shapes_in_c.row_bytes[t]);
}
static inline void zero_in_c(int t) {
    is_shaped(t);
    memset(&tiles_in_c[t], 0, sizeof *tiles_in_c);
}
/* Sums [m, n] += a [m, k] b [k, n]; anything else would be an undefined instruction. */
static inline void fits_in_c(int sums, int a, int b) {
    is_shaped(sums), is_shaped(a), is_shaped(b);
    assert(shapes_in_c.rows[sums] == shapes_in_c.rows[a] && shapes_in_c.row_bytes[sums] == shapes_in_c.row_bytes[b]);
    assert(shapes_in_c.row_bytes[a] == 4 * shapes_in_c.rows[b]);
}
static inline void bytes_in_c(int sums, int a, int b) {
    fits_in_c(sums, a, b);
    for (int m = 0; m < shapes_in_c.rows[sums]; m++) {
        int32_t to[16];
        memcpy(to, tiles_in_c[sums].row[m], sizeof to);
        for (int k = 0; k < shapes_in_c.row_bytes[a]; k++)
            for (int n = 0; n < 16; n++)
                to[n] += (int8_t)tiles_in_c[a].row[m][k] * (int8_t)tiles_in_c[b].row[k / 4][4 * n + k % 4];
        memcpy(tiles_in_c[sums].row[m], to, shapes_in_c.row_bytes[sums]);
    }
}
static inline float float_in_c(const char *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* Even depths and odd ones are summed apart, then joined, then added to what there was. A float holds a product exactly. */
static inline void floats_in_c(int sums, int a, int b) {
    fits_in_c(sums, a, b);
    float of_b[16][32];
    for (int k = 0; k < shapes_in_c.rows[b]; k++)
        for (int i = 0; i < 32; i++) of_b[k][i] = float_in_c(tiles_in_c[b].row[k] + 2 * i);
    for (int m = 0; m < shapes_in_c.rows[sums]; m++) {
        float to[16], parts[32] = {0};
        memcpy(to, tiles_in_c[sums].row[m], sizeof to);
        for (int k = 0; k < shapes_in_c.rows[b]; k++) {
            float pair[2] = {float_in_c(tiles_in_c[a].row[m] + 4 * k), float_in_c(tiles_in_c[a].row[m] + 4 * k + 2)};
            for (int i = 0; i < 32; i++) parts[i] += pair[i % 2] * of_b[k][i];
        }
        for (int n = 0; n < 16; n++) to[n] += parts[2 * n] + parts[2 * n + 1];
        memcpy(tiles_in_c[sums].row[m], to, shapes_in_c.row_bytes[sums]);
    }
}

#pragma GCC pop_options

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadd(t, from, stride) load_in_c(t, from, stride)
#define _tile_stored(t, to, stride) store_in_c(t, to, stride)
#define _tile_zero(t) zero_in_c(t)
#define _tile_dpbssd(sums, a, b) bytes_in_c(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) floats_in_c(sums, a, b)
#define _tile_release() (shapes_in_c.palette = 0)
#endif
