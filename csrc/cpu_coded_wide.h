/* Products of some rows with codes by vectors, where there are no tiles (cpu_coded_tiles.h): codes are widened to 16 bits. */

#define MANY_ROWS(l) CODED_ROWS /* at a time */
#define BEGIN_MANY(rows, l) (void)0
#define END_MANY() (void)0

/* A chunk and its codes, without their offset. */
struct wide_chunk {
    struct chunk chunk;
    pairs codes[CHUNK / 2][CODED_VECTORS];
};

INLINE void widen_codes(const struct coded *l, const uint8_t *planes, const int low, const int high, const uint8_t *table,
                        pairs out[CHUNK / 2][CODED_VECTORS]) {
    const pairs all = (pairs){0} + (uint16_t)l->type->offset;
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK / 2; i++)
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) out[i][v] = code_pair(planes, low, high, table, i, v) - all;
}

INLINE void multiply_wide(const int rows, const struct coded *l, int64_t row, int64_t number, int count,
                          const struct wide_chunk *w, struct reading *next, float *out) {
    for (int64_t at = number * l->x.rows + row; count--; at += l->x.rows, w++) {
        fetch_some(next);
        const uint32_t *x = (const uint32_t *)(l->x.values + at * CHUNK);
        struct sums s;
        for (int half = 0; half < 2; half++) {
            if (!half || l->type->groups == 2) begin_sums(rows, 0, l, at, half, &s);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) add_pair(rows, x + half * 8 + i, w->codes[half * 8 + i], &s);
            if (half || l->type->groups == 2) end_sums(rows, l, at, &w->chunk, l->type->groups == 2 && half, &s, out);
        }
    }
}

INLINE void multiply_many(int rows, const struct coded *l, int64_t row, int64_t number, int count,
                          const struct wide_chunk *w, struct reading *next, float *out) {
    switch (rows) {
    case 1: multiply_wide(1, l, row, number, count, w, next, out); break;
    case 2: multiply_wide(2, l, row, number, count, w, next, out); break;
    case 3: multiply_wide(3, l, row, number, count, w, next, out); break;
    case 4: multiply_wide(4, l, row, number, count, w, next, out); break;
    case 5: multiply_wide(5, l, row, number, count, w, next, out); break;
    default: multiply_wide(6, l, row, number, count, w, next, out);
    }
}
