/* Tiles of AMX: a product of two of them in the time that AVX-512 takes for its thirtieth. Only for levels with HAS_TILES.
 *
 * A tile has up to 16 rows of 64 bytes. C [rows, 16] of 32 bits += A [rows, depth] B [depth / word, 16 words], where a
 * word has neighbours in depth: four integers of 8 bits or two bfloat16. A row's sums do not depend on the others. How
 * large each tile is must be said before; that a thread has tiles at all costs other threads' switches time, so it is
 * taken back when a job is done. */

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

INLINE void shape_tile(struct tile_shapes *s, int tile, int rows, int words) {
    s->rows[tile] = (uint8_t)rows, s->row_bytes[tile] = (uint16_t)(4 * words);
}

#ifdef TILES_IN_C
#define use_shapes(s) shapes_into_c(s)
#else
/* Compilers take the intrinsic to read no more than the first bytes. */
INLINE void use_shapes(const struct tile_shapes *s) { __asm__ volatile("ldtilecfg %0" ::"m"(*s)); }
#endif
