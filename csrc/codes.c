/* Quantized weights: unpacks the blocks of a GGUF file and packs them into panels (codes.h).
 *
 * The layouts of blocks are GGML's: https://github.com/ggml-org/ggml, src/ggml-common.h. */
#include "codes.h"

#include <stddef.h>
#include <string.h>

#include "codes.cdef.h"

static uint16_t load_uint16(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }

/* Unpack `count` bytes: the lower nibbles are the first `count` codes, the upper nibbles the next ones. */
static void read_nibbles(const uint8_t *bytes, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15, codes[count + i] = bytes[i] >> 4;
}

/* Read Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL. The stored minimum is added, so its sign is flipped here. */
static void read_32(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    const uint8_t *fifth_bits = bytes + (t->has_minima ? 4 : 2);
    block->scale = load_uint16(bytes);
    if (t->has_minima) block->minimum = load_uint16(bytes + 2) ^ 0x8000;
    read_nibbles(fifth_bits + (t->high ? 4 : 0), 16, block->codes);
    for (int i = 0; t->high && i < 32; i++) block->codes[i] |= (fifth_bits[i / 8] >> i % 8 & 1) << 4;
}

static void read_q8_0(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    block->scale = load_uint16(bytes);
    for (int i = 0; i < 32; i++) block->codes[i] = bytes[2 + i] ^ 128;
}

/* The scale is 2^(byte - 127), halved because the table holds doubled values. Codes are inverted: 0 is the smallest. */
static void read_mxfp4(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    block->scale = bytes[0] < 2 ? 0x20 << bytes[0] : bytes[0] == 255 ? 0x7fc0 : (bytes[0] - 1) << 7;
    read_nibbles(bytes + 1, 16, block->codes);
    for (int i = 0; i < 32; i++) block->codes[i] = 15 - block->codes[i];
}

/* Unpack 2-bit codes: 32 bytes hold 128 codes, byte i those at i, i + 32, i + 64 and i + 96. */
static void read_2bit_codes(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 256; i++) codes[i] = bytes[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

static void read_q2_k(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    block->scale = load_uint16(bytes + 80), block->minimum = load_uint16(bytes + 82);
    for (int i = 0; i < 16; i++) block->inner_scales[i] = bytes[i] & 15, block->inner_minima[i] = bytes[i] >> 4;
    read_2bit_codes(bytes + 16, block->codes);
}

static void read_q3_k(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    const uint8_t *scales = bytes + 96;
    block->scale = load_uint16(bytes + 108);
    for (int i = 0; i < 16; i++)
        block->inner_scales[i] = ((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
    read_2bit_codes(bytes + 32, block->codes);
    for (int i = 0; i < 256; i++) block->codes[i] |= (bytes[i % 32] >> i / 32 & 1) << 2;
}

/* Unpack eight 6-bit scales and minima. The bytes of the first four hold the upper two bits of the last four. */
static void read_k_scales(const uint8_t *bytes, struct code_block *block) {
    block->scale = load_uint16(bytes), block->minimum = load_uint16(bytes + 2);
    for (int i = 0; i < 4; i++) {
        uint8_t scale = bytes[4 + i], minimum = bytes[8 + i], low = bytes[12 + i];
        block->inner_scales[i] = scale & 63, block->inner_scales[4 + i] = (low & 15) | scale >> 6 << 4;
        block->inner_minima[i] = minimum & 63, block->inner_minima[4 + i] = low >> 4 | minimum >> 6 << 4;
    }
}

/* Read Q4_K and Q5_K. */
static void read_k(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    read_k_scales(bytes, block);
    for (int i = 0; i < 4; i++) read_nibbles(bytes + (t->high ? 48 : 16) + 32 * i, 32, block->codes + 64 * i);
    for (int i = 0; t->high && i < 256; i++) block->codes[i] |= (bytes[16 + i % 32] >> i / 32 & 1) << 4;
}

static void read_q6_k(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    block->scale = load_uint16(bytes + 208);
    memcpy(block->inner_scales, bytes + 192, 16);
    for (int i = 0; i < 2; i++) read_nibbles(bytes + 64 * i, 64, block->codes + 128 * i);
    for (int i = 0; i < 256; i++)
        block->codes[i] |= (bytes[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
}

static void read_iq4_xs(const struct code_type *t, const uint8_t *bytes, struct code_block *block) {
    uint16_t high = load_uint16(bytes + 2);
    block->scale = load_uint16(bytes);
    for (int i = 0; i < 8; i++) {
        block->inner_scales[i] = ((bytes[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4) - 32;
        read_nibbles(bytes + 8 + 16 * i, 16, block->codes + 32 * i);
    }
}

static const uint8_t iq4_nl_values[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
static const uint8_t fp4_values[16] = {0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12};

const struct code_type code_types[] = {
    {"Q4_0", read_32, .values = 32, .bytes = 18, .low = 4, .groups = 1, .offset = 8},
    {"Q4_1", read_32, .values = 32, .bytes = 20, .low = 4, .groups = 1, .has_minima = 1},
    {"Q5_0", read_32, .values = 32, .bytes = 22, .low = 4, .high = 1, .groups = 1, .offset = 16},
    {"Q5_1", read_32, .values = 32, .bytes = 24, .low = 4, .high = 1, .groups = 1, .has_minima = 1},
    {"Q8_0", read_q8_0, .values = 32, .bytes = 34, .low = 8, .groups = 1, .offset = 128},
    {"Q2_K", read_q2_k, .values = 256, .bytes = 84, .low = 2, .groups = 2, .has_minima = 1, .has_inner = 1},
    {"Q3_K", read_q3_k, .values = 256, .bytes = 110, .low = 2, .high = 1, .groups = 2, .has_inner = 1, .offset = 4},
    {"Q4_K", read_k, .values = 256, .bytes = 144, .low = 4, .groups = 1, .has_minima = 1, .has_inner = 1},
    {"Q5_K", read_k, .values = 256, .bytes = 176, .low = 4, .high = 1, .groups = 1, .has_minima = 1, .has_inner = 1},
    {"Q6_K", read_q6_k, .values = 256, .bytes = 210, .low = 4, .high = 2, .groups = 2, .has_inner = 1, .offset = 32},
    {"IQ4_NL", read_32, .values = 32, .bytes = 18, .low = 4, .groups = 1, .offset = 127, .table = iq4_nl_values},
    {"IQ4_XS", read_iq4_xs, .values = 256, .bytes = 136, .low = 4, .groups = 1, .has_inner = 1, .offset = 127,
     .table = iq4_nl_values},
    {"MXFP4", read_mxfp4, .values = 32, .bytes = 17, .low = 4, .groups = 1, .is_bfloat16 = 1, .offset = 12,
     .table = fp4_values},
    /* Not GGUF types: the codes of penstock_group_pack with an integer zero point. The minimum, scale * (zero point -
     * offset), is exact. */
    {"G4", .values = 32, .low = 4, .groups = 1, .has_minima = 1, .has_inner = 1, .offset = 8},
    {"G8", .values = 32, .low = 8, .groups = 1, .has_minima = 1, .has_inner = 1, .offset = 128},
    {"G4_BF16", .values = 32, .low = 4, .groups = 1, .has_minima = 1, .has_inner = 1, .is_bfloat16 = 1, .offset = 8},
    {"G8_BF16", .values = 32, .low = 8, .groups = 1, .has_minima = 1, .has_inner = 1, .is_bfloat16 = 1, .offset = 128},
};

const char *penstock_code_name(int type) {
    return (size_t)type < sizeof code_types / sizeof *code_types ? code_types[type].name : NULL;
}

int penstock_code_block_values(int type) { return code_types[type].values; }
int penstock_code_block_bytes(int type) { return code_types[type].bytes; }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Convert the bits of a float16 or bfloat16 to float. Infinities and NaN are not converted: see is_finite. */
static float to_float(uint16_t bits, int is_bfloat16) {
    if (is_bfloat16) return from_bits((uint32_t)bits << 16);
    float size = from_bits((bits & 0x7fffu) << 13) * 0x1p112f; /* the exponent's bias is 15 there, 127 here */
    return bits & 0x8000 ? -size : size;
}

static int is_finite(const struct code_type *t, const struct code_block *block) {
    uint16_t exponent = t->is_bfloat16 ? 0x7f80 : 0x7c00;
    return (block->scale & exponent) != exponent && (block->minimum & exponent) != exponent;
}

static void dequantize(const struct code_type *t, const struct code_block *block, float *values) {
    float scale = to_float(block->scale, t->is_bfloat16), minimum = to_float(block->minimum, t->is_bfloat16);
    int group = CHUNK / t->groups;
    for (int i = 0; i < t->values; i++) {
        int code = block->codes[i], value = (t->table ? t->table[code] : code) - t->offset;
        float group_scale = t->has_inner ? scale * block->inner_scales[i / group] : scale;
        float group_minimum = !t->has_minima ? 0 : t->has_inner ? minimum * block->inner_minima[i / group] : minimum;
        values[i] = group_scale * value - group_minimum;
    }
}

int64_t penstock_code_values(int type, uintptr_t bytes, int64_t blocks, uintptr_t values) {
    const struct code_type *t = &code_types[type];
    for (int64_t i = 0; i < blocks; i++) {
        struct code_block block = {.minimum = 0};
        t->read(t, (const uint8_t *)bytes + i * t->bytes, &block);
        if (!is_finite(t, &block)) return i;
        dequantize(t, &block, (float *)values + i * t->values);
    }
    return -1;
}

/* Return the zero point of the codes that penstock_code_groups writes for a type without minima. */
static int zero_point(const struct code_type *t) { return !t->table && t->low + t->high <= 4 ? 8 : 128; }

int penstock_code_group_bits(int type) { return zero_point(&code_types[type]) == 8 ? 4 : 8; }
int penstock_code_group_values(int type) { return CHUNK / code_types[type].groups; }
int penstock_code_has_minima(int type) { return code_types[type].has_minima; }

int64_t penstock_code_groups(int type, uintptr_t bytes, int64_t blocks, uintptr_t codes, uintptr_t scales,
                             uintptr_t minima) {
    const struct code_type *t = &code_types[type];
    const int group = CHUNK / t->groups, shift = t->has_minima ? 0 : zero_point(t) - t->offset;
    uint8_t *code = (uint8_t *)codes;
    float *group_scale = (float *)scales, *group_minimum = (float *)minima;
    for (int64_t n = 0; n < blocks; n++) {
        struct code_block block = {.minimum = 0};
        t->read(t, (const uint8_t *)bytes + n * t->bytes, &block);
        if (!is_finite(t, &block)) return n;
        float scale = to_float(block.scale, t->is_bfloat16), minimum = to_float(block.minimum, t->is_bfloat16);
        for (int i = 0; i < t->values; i++) *code++ = (t->table ? t->table[block.codes[i]] : block.codes[i]) + shift;
        for (int i = 0; i < t->values / group; i++) {
            *group_scale++ = t->has_inner ? scale * block.inner_scales[i] : scale;
            if (t->has_minima) *group_minimum++ = t->has_inner ? minimum * block.inner_minima[i] : minimum;
        }
    }
    return -1;
}

int64_t penstock_code_bytes(int type, int64_t rows, int64_t depth, int columns) {
    return (rows + columns - 1) / columns * panel_bytes(&code_types[type], depth, columns);
}

/* Bring the four bytes of a word into the order of BYTE_OF, or back. */
static inline uint32_t reorder(uint32_t x) { return (x & 0xff0000ff) | (x >> 8 & 0xff00) | (x & 0xff00) << 8; }

/* Pack bits [shift, shift + bits) of 32 / bits codes into a word of a plane. */
static inline uint32_t pack_word(const uint8_t *codes, int bits, int shift) {
    uint32_t packed = 0, mask = ((1u << bits) - 1) * 0x01010101, four;
    for (int at = 0; at < 8; at += bits, codes += 4) {
        memcpy(&four, codes, 4);
        packed |= (reorder(four) >> shift & mask) << at;
    }
    return packed;
}

static inline void unpack_word(uint32_t packed, int bits, int shift, uint8_t *codes) {
    uint32_t mask = ((1u << bits) - 1) * 0x01010101, four;
    for (int at = 0; at < 8; at += bits, codes += 4) {
        memcpy(&four, codes, 4);
        four |= reorder(packed >> at & mask) << shift;
        memcpy(codes, &four, 4);
    }
}

/* Copy a block into its column of a panel, or back. Bit widths known at compile time make this twice as fast. */
static inline __attribute__((always_inline)) void copy_block(const int low, const int high, const int groups,
                                                             const uint8_t *table, const struct code_type *t,
                                                             struct code_block *block, uint8_t *panel, int64_t chunk,
                                                             int column, int columns, const int packs) {
#define COPY(packed, unpacked) \
    (packs ? memcpy(packed, unpacked, sizeof *(unpacked)) : memcpy(unpacked, packed, sizeof *(unpacked)))
    uint8_t *header = panel + header_at(t, chunk, columns);
    COPY(header + 2 * column, &block->scale);
    if (t->has_minima) COPY(header + 2 * (columns + column), &block->minimum);
    for (int i = 0; i < t->values / CHUNK; i++) {
        uint8_t *at = panel + chunk_at(t, chunk + i, columns) + 4 * column, *codes = block->codes + i * CHUNK;
#pragma GCC unroll 2
        for (int plane = 0; plane < 2; plane++) {
            const int bits = plane ? high : low, shift = plane ? low : 0;
#pragma GCC unroll 8
            for (int word = 0; word < bits; word++, at += 4 * columns) {
                uint8_t *word_codes = codes + word * (32 / bits);
                uint32_t value = packs ? pack_word(word_codes, bits, shift) : 0;
                COPY(at, &value);
                if (!packs) unpack_word(value, bits, shift, word_codes);
            }
        }
        at -= 3 * column;
        for (int group = i * groups; t->has_inner && group < (i + 1) * groups; group++, at += columns) {
            COPY(at, block->inner_scales + group);
            if (t->has_minima) COPY(at + groups * columns, block->inner_minima + group);
        }
    }
#undef COPY
}

int64_t penstock_code_pack(int type, uintptr_t bytes, int64_t rows, int64_t depth, int columns, uintptr_t panels) {
    const struct code_type *t = &code_types[type];
    const uint8_t *from = (const uint8_t *)bytes;
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *panel = (uint8_t *)panels + row / columns * panel_bytes(t, depth, columns);
        for (int64_t at = 0; at < depth; at += t->values, from += t->bytes) {
            struct code_block block = {.minimum = 0};
            t->read(t, from, &block);
            if (!is_finite(t, &block)) return row;
            BY_BITS(t, copy_block, t, &block, panel, at / CHUNK, row % columns, columns, 1);
        }
    }
    return -1;
}

void penstock_group_pack(int type, uintptr_t codes, uintptr_t scales, uintptr_t zeros, int64_t rows, int64_t depth,
                         int64_t group, int columns, uintptr_t panels) {
    const struct code_type *t = &code_types[type];
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *panel = (uint8_t *)panels + row / columns * panel_bytes(t, depth, columns);
        for (int64_t at = 0; at < depth; at += CHUNK) {
            int64_t index = row * (depth / group) + at / group;
            struct code_block block = {.scale = ((const uint16_t *)scales)[index], .minimum = 0};
            memcpy(block.codes, (const uint8_t *)codes + row * depth + at, CHUNK);
            if (t->has_minima) {
                block.minimum = block.scale, block.inner_scales[0] = 1;
                block.inner_minima[0] = zeros ? (int8_t)(((const uint8_t *)zeros)[index] - t->offset) : 0;
            }
            BY_BITS(t, copy_block, t, &block, panel, at / CHUNK, row % columns, columns, 1);
        }
    }
}

int penstock_code_rows(int type, uintptr_t panels, int64_t height, int64_t depth, int columns, uintptr_t indices,
                       int64_t num, uintptr_t rows) {
    const struct code_type *t = &code_types[type];
    float *to = (float *)rows;
    for (int64_t i = 0; i < num; i++) {
        int64_t row = ((const int64_t *)indices)[i];
        if ((uint64_t)row >= (uint64_t)height) return -1;
        uint8_t *panel = (uint8_t *)panels + row / columns * panel_bytes(t, depth, columns);
        for (int64_t at = 0; at < depth; at += t->values, to += t->values) {
            struct code_block block = {.minimum = 0};
            BY_BITS(t, copy_block, t, &block, panel, at / CHUNK, row % columns, columns, 0);
            dequantize(t, &block, to);
        }
    }
    return 0;
}
