/* Grammar masks on CPU logits: a multiplication expands bits to lanes of a 64-bit word, without table or branch. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_mask.cdef.h"

/* Expand bit i of four to lane i of 16 bits: the factor copies the nibble to four places without overlap. */
static uint64_t lanes16(uint32_t nibble) {
    return ((nibble * UINT64_C(0x0000200040008001)) & UINT64_C(0x0001000100010001)) * 0xFFFF;
}

static uint64_t lanes32(uint32_t pair) {
    return ((pair * UINT64_C(0x80000001)) & UINT64_C(0x0000000100000001)) * 0xFFFFFFFF;
}

/* Apply one mask word to 32 elements. */
static void mask_word(char *at, uint32_t bits, int element_bytes, uint64_t lowest) {
    const int step = element_bytes == 2 ? 4 : 2;
    for (int first = 0; first < 32; first += step, at += 8) {
        uint64_t kept, value;
        kept = step == 4 ? lanes16(bits >> first & 15) : lanes32(bits >> first & 3);
        memcpy(&value, at, 8);
        value = (value & kept) | (lowest & ~kept);
        memcpy(at, &value, 8);
    }
}

void penstock_mask(uintptr_t logits, int64_t row_stride, int element_bytes, uint32_t lowest, uintptr_t rows,
                   uintptr_t masks, int64_t num_rows, int64_t words, int64_t vocab) {
    const int64_t *row = (const int64_t *)rows;
    const uint64_t pattern = element_bytes == 2 ? lowest * UINT64_C(0x0001000100010001)
                                                : lowest * UINT64_C(0x0000000100000001);
    for (int64_t i = 0; i < num_rows; i++) {
        char *at = (char *)logits + row[i] * row_stride * element_bytes;
        const uint32_t *mask = (const uint32_t *)masks + i * words;
        const int64_t whole = vocab / 32;
        for (int64_t word = 0; word < whole; word++, at += 32 * element_bytes)
            if (mask[word] != UINT32_MAX) mask_word(at, mask[word], element_bytes, pattern);
        for (int64_t rest = 0; rest < vocab % 32; rest++, at += element_bytes)
            if (!(mask[whole] >> rest & 1)) memcpy(at, &pattern, element_bytes);
    }
}
