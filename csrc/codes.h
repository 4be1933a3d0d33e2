/* Quantized weights: the blocks of a GGUF file, and the panels that the CPU kernels read. A code is a quantized value,
 * an integer of 2 to 8 bits; a weight is scale * (value of its code - offset) - minimum. A quantization group of 16 or
 * 32 neighbours in depth shares a scale and a minimum.
 *
 * A panel holds as many rows of the weight as the product of the instruction level has columns; each row is a column of
 * the panel, so a vector loads one word of each row. For each block in depth, with the columns side by side, it has:
 *
 *   header  uint16 scale; with minima, uint16 minimum (float16 or bfloat16)
 *   then for each chunk:
 *   planes  uint32 [bits] for the low bits of the codes, then for the high bits: a word holds 32 / bits codes, four
 *           neighbours in depth in its four bytes, in the order of BYTE_OF
 *   inner   int8 [groups], factors of the scale; with minima, int8 [groups], factors of the minimum */
#ifndef PENSTOCK_CODES_H
#define PENSTOCK_CODES_H

#include <stddef.h>
#include <stdint.h>

#define CHUNK 32 /* neighbours in depth; words and groups never cross a chunk boundary */
#define MAX_BLOCK_VALUES 256

/* The byte of a word that holds code 0 … 3: the low bytes of its halves are codes 0 and 1, the high bytes 2 and 3. */
#define BYTE_OF(code) (((code) & 1) << 1 | ((code) & 2) >> 1)

/* One unpacked block of a file. */
struct code_block {
    uint8_t codes[MAX_BLOCK_VALUES];
    uint16_t scale, minimum; /* bits of a float16 or bfloat16 */
    int8_t inner_scales[MAX_BLOCK_VALUES / 16];
    int8_t inner_minima[MAX_BLOCK_VALUES / 16];
};

struct code_type {
    const char *name;
    void (*read)(const struct code_type *type, const uint8_t *bytes, struct code_block *block);
    int values, bytes;         /* per block of a file */
    int low, high;             /* bits per code in the low plane and in the high plane */
    int groups;                /* per chunk */
    int has_minima, has_inner; /* has_inner: each group has an inner scale and, with minima, an inner minimum */
    int is_bfloat16;           /* the header is bfloat16, not float16 */
    int offset;                /* subtracted from a code, or from its value in the table */
    const uint8_t *table;      /* 16 values, the first of them 0; NULL: a code is its value */
};

extern const struct code_type code_types[];

static inline int64_t header_bytes(const struct code_type *t, int columns) { return 2 * columns * (1 + t->has_minima); }

static inline int64_t chunk_bytes(const struct code_type *t, int columns) {
    return columns * (4 * (t->low + t->high) + t->has_inner * t->groups * (1 + t->has_minima));
}

static inline int64_t panel_bytes(const struct code_type *t, int64_t depth, int columns) {
    return depth / t->values * header_bytes(t, columns) + depth / CHUNK * chunk_bytes(t, columns);
}

/* Return the byte offset of the header of chunk `index` in a panel. A header covers one chunk or eight. */
static inline int64_t header_at(const struct code_type *t, int64_t index, int columns) {
    if (t->values == CHUNK) return index * (header_bytes(t, columns) + chunk_bytes(t, columns));
    return (index >> 3) * (header_bytes(t, columns) + 8 * chunk_bytes(t, columns));
}

static inline int64_t chunk_at(const struct code_type *t, int64_t index, int columns) {
    int64_t chunk = t->values == CHUNK ? 0 : index & 7;
    return header_at(t, index, columns) + header_bytes(t, columns) + chunk * chunk_bytes(t, columns);
}

/* Call `function` with constants for the bits of a type's planes and its groups per chunk, and with its table. */
#define BY_BITS(code_type, function, ...)                                          \
    switch ((code_type)->low * 4 + (code_type)->high) {                            \
    case 8: function(2, 0, 2, NULL, __VA_ARGS__); break;                           \
    case 9: function(2, 1, 2, NULL, __VA_ARGS__); break;                           \
    case 16:                                                                       \
        if ((code_type)->table) function(4, 0, 1, (code_type)->table, __VA_ARGS__); \
        else function(4, 0, 1, NULL, __VA_ARGS__);                                 \
        break;                                                                     \
    case 17: function(4, 1, 1, NULL, __VA_ARGS__); break;                          \
    case 18: function(4, 2, 2, NULL, __VA_ARGS__); break;                          \
    default: function(8, 0, 1, NULL, __VA_ARGS__);                                 \
    }

#endif
