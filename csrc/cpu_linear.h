/* Linear layers over weights that were repacked once, compiled once per level.
 *
 * A block of the weight is as wide as the product's columns and as deep as the layer, and contiguous: a single row
 * streams it from memory at full speed, many rows find it in the second-level cache. bfloat16 stays in pairs on every
 * level. A row's sums run in the order of the depth whatever other rows there are (see cpu_product.h). Where there are
 * tiles, pairs are multiplied by them alone, also for one row: they round in another order than vectors do. */

#if HAS_TILES
/* Tiles 0 to 3 are sums, 4 of rows and 5 of the weight; 6 and 7 are these for what is left of the depth. */
INLINE void shape_pairs(int rows, int rest) {
    struct tile_shapes s = {.palette = 1};
    for (int tile = 0; tile < 4; tile++) shape_tile(&s, tile, rows, LANES);
    shape_tile(&s, 4, rows, LANES), shape_tile(&s, 5, LANES, LANES);
    if (rest) shape_tile(&s, 6, rows, rest), shape_tile(&s, 7, rest, LANES);
    use_shapes(&s);
}

#define MULTIPLY_PAIRS(a, b)                              \
    do {                                                  \
        _tile_loadd(a, x + k, 4 * x_stride);              \
        _tile_loadd(b, w, 4 * COLUMNS);                   \
        _tile_dpbf16ps(0, a, b);                          \
        _tile_loadd(b, w + LANES, 4 * COLUMNS);           \
        _tile_dpbf16ps(1, a, b);                          \
        _tile_loadd(b, w + 2 * LANES, 4 * COLUMNS);       \
        _tile_dpbf16ps(2, a, b);                          \
        _tile_loadd(b, w + 3 * LANES, 4 * COLUMNS);       \
        _tile_dpbf16ps(3, a, b);                          \
    } while (0)

/* As `multiply` of cpu_product.h, for as many rows as the tiles were shaped for. */
INLINE void multiply_pairs(const uint32_t *x, int64_t x_stride, const uint32_t *weight, int64_t depth, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    const uint32_t *w = weight;
    for (; k + LANES <= depth; k += LANES, w += LANES * COLUMNS) MULTIPLY_PAIRS(4, 5);
    if (k < depth) MULTIPLY_PAIRS(6, 7);
    _tile_stored(0, sums, 4 * COLUMNS);
    _tile_stored(1, sums + LANES, 4 * COLUMNS);
    _tile_stored(2, sums + 2 * LANES, 4 * COLUMNS);
    _tile_stored(3, sums + 3 * LANES, 4 * COLUMNS);
}
#endif

/* A few rows of block `block`: their sums, the bias on them, into y. */
INLINE void put_sums(const struct linear *l, const float *sums, int64_t block, int64_t row, int rows, enum element type) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0, at = block * COLUMNS; i < COLUMNS && at < l->width; i += LANES, at += LANES) {
            vec y = load(sums, r * COLUMNS + i, LANES, FLOAT32);
            if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
            store(l->y, (row + r) * l->width + at, l->width - at, y, type);
        }
}

/* Parts [first, end) of the work: part p is block p / row_parts, for row part p % row_parts. */
INLINE void linear_parts(const struct linear *l, int64_t first, int64_t end, enum element type) {
    const int by_tiles = HAS_TILES && type == BFLOAT16, most = by_tiles ? 16 : ROWS;
    float sums[16 * COLUMNS];
    int shaped = 0; /* the rows that tiles are shaped for */
    for (int64_t part = first; part < end; part++) {
        int64_t block = part / l->row_parts, row = part % l->row_parts * LINEAR_ROWS;
        int64_t end_row = row + LINEAR_ROWS < l->rows ? row + LINEAR_ROWS : l->rows;
        const uint32_t *weight = l->weight + block * l->depth * COLUMNS;
        for (; row < end_row; row += most) {
            const uint32_t *x = (const uint32_t *)l->x + row * l->x_stride;
            int some = end_row - row < most ? (int)(end_row - row) : most;
#if HAS_TILES
            if (by_tiles) {
                if (shaped != some) shape_pairs(some, l->depth % LANES);
                shaped = some;
                multiply_pairs(x, l->x_stride, weight, l->depth, sums);
            } else
#endif
                multiply_rows(some, VECTORS, x, l->x_stride, weight, COLUMNS, (int)l->depth, sums, COLUMNS,
                              type == BFLOAT16);
            put_sums(l, sums, block, row, some, type);
        }
    }
    (void)shaped;
#if HAS_TILES
    if (shaped) _tile_release();
#endif
}

IN_BOTH_TYPES(linear, linear_parts, (const struct linear *l, int64_t first, int64_t end), l, first, end)
