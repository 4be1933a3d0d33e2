/* Linear layers over weights that were repacked once, compiled once per level. A block of the weight has the layer's
 * whole depth and is contiguous: a single row streams it from memory at full speed, many rows read it from the L2
 * cache. bfloat16 stays in pairs on every level. A row's sums are accumulated in depth order, independent of the other
 * rows (see cpu_product.h). */

/* Store the sums of some rows in a block to y, plus the bias. */
INLINE void store_sums(const struct linear *l, const float *sums, struct block block, int64_t row, int rows,
                       enum element type) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0, at = block.first; i < block.columns && at < l->width; i += LANES, at += LANES) {
            vec y = load(sums, r * COLUMNS + i, LANES, FLOAT32);
            if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
            if (l->adds) y += load(l->y, (row + r) * l->y_stride + at, l->width - at, type);
            store(l->y, (row + r) * l->y_stride + at, l->width - at, y, type);
        }
}

INLINE void multiply_block(const struct linear *l, struct block block, int64_t row, int rows, float *sums,
                           enum element type) {
    const uint32_t *x = (const uint32_t *)l->x + row * l->x_stride, *weight = l->weight + block.first * l->depth;
    const int is_narrow = COLUMNS > NARROW_COLUMNS && block.columns < COLUMNS;
#define MULTIPLY(vectors, words)                                                                                 \
    multiply_rows(rows, vectors, x, l->x_stride, weight, (vectors) * LANES, (int)l->depth, sums, COLUMNS, words)
#define MULTIPLY_WORDS(words)                \
    if (is_narrow) MULTIPLY(1, words);       \
    else MULTIPLY(VECTORS, words)
    if (type == BFLOAT16) {
        MULTIPLY_WORDS(PAIRS);
    } else if (l->has_pairs) {
        MULTIPLY_WORDS(PAIRS_OF_FLOATS);
    } else {
        MULTIPLY_WORDS(FLOATS);
    }
#undef MULTIPLY_WORDS
#undef MULTIPLY
}

/* Compute parts [first, end), in the order that struct linear describes. */
INLINE void linear_parts(const struct linear *l, int64_t first, int64_t end, enum element type) {
    float sums[ROWS * COLUMNS];
    for (int64_t part = first; part < end; part++) {
        int64_t outer = part / l->inner_parts, inner = part % l->inner_parts;
        struct block block = block_at(l->is_by_rows ? inner : outer, l->width, COLUMNS);
        int64_t row = (l->is_by_rows ? outer : inner) * l->part_rows;
        int64_t end_row = row + l->part_rows < l->rows ? row + l->part_rows : l->rows;
        for (; row < end_row; row += ROWS) {
            int rows = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
            multiply_block(l, block, row, rows, sums, type);
            store_sums(l, sums, block, row, rows, type);
        }
    }
}

IN_BOTH_TYPES(linear, linear_parts, RANGE_PARAMETERS, op, first, end)
