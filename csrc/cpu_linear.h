/* Linear layers over weights that were repacked once, compiled once per level. A block of the weight has COLUMNS
 * columns and the layer's whole depth and is contiguous: a single row streams it from memory at full speed, many rows
 * read it from the L2 cache. bfloat16 stays in pairs on every level. A row's sums are accumulated in depth order,
 * independent of the other rows (see cpu_product.h). */

/* Store the sums of some rows in block `block` to y, plus the bias. */
INLINE void store_sums(const struct linear *l, const float *sums, int64_t block, int64_t row, int rows,
                       enum element type) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0, at = block * COLUMNS; i < COLUMNS && at < l->width; i += LANES, at += LANES) {
            vec y = load(sums, r * COLUMNS + i, LANES, FLOAT32);
            if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
            store(l->y, (row + r) * l->y_stride + at, l->width - at, y, type);
        }
}

/* Compute parts [first, end): part p is block p / row_parts and row part p % row_parts. */
INLINE void linear_parts(const struct linear *l, int64_t first, int64_t end, enum element type) {
    float sums[ROWS * COLUMNS];
    for (int64_t part = first; part < end; part++) {
        int64_t block = part / l->row_parts, row = part % l->row_parts * LINEAR_ROWS;
        int64_t end_row = row + LINEAR_ROWS < l->rows ? row + LINEAR_ROWS : l->rows;
        const uint32_t *weight = l->weight + block * l->depth * COLUMNS;
        for (; row < end_row; row += ROWS) {
            const uint32_t *x = (const uint32_t *)l->x + row * l->x_stride;
            int some = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
            multiply_rows(some, VECTORS, x, l->x_stride, weight, COLUMNS, (int)l->depth, sums, COLUMNS,
                          type == BFLOAT16);
            store_sums(l, sums, block, row, some, type);
        }
    }
}

IN_BOTH_TYPES(linear, linear_parts, RANGE_PARAMETERS, op, first, end)
