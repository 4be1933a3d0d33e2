/* Linear layers over weights that were repacked once, compiled once per level.
 *
 * A block of the weight is as wide as the product's columns and as deep as the layer, and contiguous: a single row
 * streams it from memory at full speed, many rows find it in the second-level cache. bfloat16 stays in pairs on every
 * level. A row's sums run in the order of the depth whatever other rows there are (see cpu_product.h). */

INLINE void linear_blocks(const struct linear *l, int64_t first_block, int64_t end_block, enum element type) {
    for (int64_t block = first_block; block < end_block; block++) {
        const uint32_t *weight = l->weight + block * l->depth * COLUMNS;
        for (int64_t row = 0; row < l->rows; row += ROWS) {
            float sums[ROWS * COLUMNS];
            int some = l->rows - row < ROWS ? (int)(l->rows - row) : ROWS;
            multiply_rows(some, VECTORS, (const uint32_t *)l->x + row * l->x_stride, l->x_stride, weight, COLUMNS,
                          (int)l->depth, sums, COLUMNS, type == BFLOAT16);
            for (int r = 0; r < some; r++)
                for (int64_t i = 0, at = block * COLUMNS; i < COLUMNS && at < l->width; i += LANES, at += LANES) {
                    vec y = load(sums, r * COLUMNS + i, LANES, FLOAT32);
                    if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
                    store(l->y, (row + r) * l->width + at, l->width - at, y, type);
                }
        }
    }
}

static void linear_float32(const struct linear *l, int64_t first, int64_t end) {
    linear_blocks(l, first, end, FLOAT32);
}
static void linear_bfloat16(const struct linear *l, int64_t first, int64_t end) {
    linear_blocks(l, first, end, BFLOAT16);
}
