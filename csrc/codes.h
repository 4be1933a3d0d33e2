/* Quantized weights as a GGUF file stores them, and as they are kept: codes, integers of 2 to 8 bits.
 *
 * A weight is scale · (value of its code - offset) - minimum; scale and minimum belong to 16 or 32 neighbours in depth.
 * Kept are panels of so many rows of the weight as the level's product has columns, so that a vector has one word of
 * each. Header after header of depth (`values` of a block) a panel has, and everything in it by column:
 *
 *   header  uint16 scale; with minima, uint16 minimum (float16, or bfloat16)
 *   then for each chunk:
 *   planes  uint32 [bits] for the low bits of the codes, and for the high ones: a word has 32 / bits codes, four
 *           neighbours in depth in its four bytes, in the order of BYTE_OF
 *   inner   int8 [groups] by which the header's scale is multiplied; with minima, int8 [groups] */
#ifndef PENSTOCK_CODES_H
#define PENSTOCK_CODES_H

#include <stdint.h>

#define CHUNK 32  /* of depth; words and groups never cross it */
#define LONGEST 256 /* values of a block */

/* So that a word masked to the lower bytes of its halves has two neighbours, and the next two in their upper ones. */
#define BYTE_OF(code) (((code) & 1) << 1 | ((code) & 2) >> 1)

/* A block of a file: its codes, and what they are multiplied by. */
struct code_block {
    uint8_t codes[LONGEST];
    uint16_t scale, minimum;
    int8_t inner_scales[LONGEST / 16];
    int8_t inner_minima[LONGEST / 16];
};

struct code_type {
    const char *name;
    void (*read)(const uint8_t *bytes, struct code_block *block);
    int values, bytes;         /* of a block in a file */
    int low, high;             /* bits of the planes */
    int groups;                /* in a chunk */
    int minima, inner;         /* whether there are any */
    int is_bfloat16;           /* the header is */
    int offset;                /* of a code, or of what the table has for it */
    const uint8_t *table;      /* 16 values, of which the first is 0; NULL: codes are values */
};

extern const struct code_type code_types[];

static inline int64_t header_bytes(const struct code_type *t, int columns) { return 2 * columns * (1 + t->minima); }

static inline int64_t chunk_bytes(const struct code_type *t, int columns) {
    return columns * (4 * (t->low + t->high) + t->inner * t->groups * (1 + t->minima));
}

static inline int64_t panel_bytes(const struct code_type *t, int64_t depth, int columns) {
    return depth / t->values * header_bytes(t, columns) + depth / CHUNK * chunk_bytes(t, columns);
}

/* Offsets in a panel of chunk `number` and of its header. A header belongs to one chunk or to eight. */
static inline int64_t header_at(const struct code_type *t, int64_t number, int columns) {
    if (t->values == CHUNK) return number * (header_bytes(t, columns) + chunk_bytes(t, columns));
    return (number >> 3) * (header_bytes(t, columns) + 8 * chunk_bytes(t, columns));
}

static inline int64_t chunk_at(const struct code_type *t, int64_t number, int columns) {
    int64_t in_header = t->values == CHUNK ? 0 : number & 7;
    return header_at(t, number, columns) + header_bytes(t, columns) + in_header * chunk_bytes(t, columns);
}

#endif
