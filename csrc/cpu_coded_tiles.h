/* Products of some rows with codes by the tiles of AMX: the sums that cpu_coded.h makes with vectors, to the last bit.
 *
 * A row's integers are two digits, value = 256 · upper + lower. As long as a group's sum is an integer that a float holds
 * exactly, tiles of bfloat16 take 256 · upper, lower and the codes themselves, and what they sum is scaled at once. Other
 * codes are multiplied in bytes: a tile has up to eight rows' upper digits and beneath each of them its lower ones, so that
 * one product makes both sums, which vectors join. In either case vectors scale one group's sums while tiles make the next. */

#define WORDS (CHUNK / 4)
#define PAIRS (CHUNK / 2)

/* A chunk and its codes, without their offset, by column: pairs of bfloat16 that are neighbours in depth, or four bytes. */
struct wide_chunk {
    struct chunk chunk;
    uint32_t codes[PAIRS][CODED_COLUMNS];
};

#define MANY_ROWS(l) ((l)->sums_are_floats ? 16 : 8) /* at a time */

INLINE void widen_to_bytes(const uint8_t *planes, const int low, const int high, const uint8_t *table, int offset,
                           uint32_t out[PAIRS][CODED_COLUMNS]) {
    typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
    const bytes all = (bytes){0} + (uint8_t)offset;
#pragma GCC unroll 8
    for (int i = 0; i < WORDS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) {
            bytes word = (bytes)value_quad(planes, low, high, table, i, v) - all;
            memcpy(out[i] + v * LANES, &word, sizeof word);
        }
}

/* Codes of up to six bits are places in a table of their values. */
INLINE void widen_to_floats(const uint8_t *planes, const int low, const int high, const uint16_t *values,
                            uint32_t out[PAIRS][CODED_COLUMNS]) {
    const __m512i first = _mm512_loadu_si512(values), second = _mm512_loadu_si512(values + 2 * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < PAIRS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) {
            __m512i codes = (__m512i)code_pair(planes, low, high, NULL, i, v);
            __m512i pair = low + high > 5 ? _mm512_permutex2var_epi16(first, codes, second)
                                          : _mm512_permutexvar_epi16(codes, first);
            memcpy(out[i] + v * LANES, &pair, sizeof pair);
        }
}

INLINE void widen_codes(const struct coded *l, const uint8_t *planes, const int low, const int high, const uint8_t *table,
                        uint32_t out[PAIRS][CODED_COLUMNS]) {
    if (l->sums_are_floats) widen_to_floats(planes, low, high, l->values, out);
    else widen_to_bytes(planes, low, high, table, l->type->offset, out);
}

/* Sums of a group: of rows and a vector of columns, or for each row its upper digits' and its lower ones', twice. */
union group_sums {
    vec floats[16];
    ivec integers[CODED_VECTORS][16];
};

/* Tiles 0 to 3 are sums, in two sets, so that a product need not wait until the sums before it are stored; 4 and 5 are of
 * rows, 6 and 7 of codes. The numbers of tiles are part of the instructions. */
INLINE void shape_coded_tiles(int all_rows, const struct coded *l) {
    int most = MANY_ROWS(l), times = (all_rows + most - 1) / most;
    int rows = (all_rows + times - 1) / times * (l->sums_are_floats ? 1 : 2);
    int depth = (l->sums_are_floats ? PAIRS : WORDS) / l->type->groups;
    struct tile_shapes s = {.palette = 1};
    for (int tile = 0; tile < 4; tile++) shape_tile(&s, tile, rows, LANES);
    for (int tile = 4; tile < 6; tile++) shape_tile(&s, tile, rows, depth);
    for (int tile = 6; tile < 8; tile++) shape_tile(&s, tile, depth, LANES);
    use_shapes(&s);
}

#define BEGIN_MANY(rows, l) shape_coded_tiles(rows, l)
#define END_MANY() _tile_release()

#define MULTIPLY_BYTES(first, second, x_tile)             \
    do {                                                  \
        _tile_zero(first);                                \
        _tile_zero(second);                               \
        _tile_loadd(x_tile, x, CHUNK);                    \
        _tile_loadd(6, codes, 4 * CODED_COLUMNS);         \
        _tile_loadd(7, codes + LANES, 4 * CODED_COLUMNS); \
        _tile_dpbssd(first, x_tile, 6);                   \
        _tile_dpbssd(second, x_tile, 7);                  \
        _tile_stored(first, to->integers[0], 64);         \
        _tile_stored(second, to->integers[1], 64);        \
    } while (0)

#define MULTIPLY_FLOATS(sums, code_tile)                 \
    do {                                                 \
        _tile_zero(sums);                                \
        _tile_loadd(4, x, 4 * CHUNK);                    \
        _tile_loadd(5, x + PAIRS, 4 * CHUNK);            \
        _tile_loadd(code_tile, codes, 4 * CODED_COLUMNS); \
        _tile_dpbf16ps(sums, 4, code_tile);              \
        _tile_dpbf16ps(sums, 5, code_tile);              \
        _tile_stored(sums, to->floats, 64);              \
    } while (0)

/* What `many` rows have in common. */
struct many {
    int64_t all_rows, at; /* where the first chunk of the first row is among all */
    const uint32_t *digits; /* of it */
    const float *scales, *below[2]; /* by group */
    const struct wide_chunk *wide;
};

INLINE void multiply_group(const int are_floats, const int groups, const struct many *m, int v, int number,
                           union group_sums *to) {
    int chunk = number / groups, part = number % groups, depth = (are_floats ? PAIRS : WORDS) / groups;
    const uint32_t *codes = m->wide[chunk].codes[part * depth] + v * LANES;
    const uint32_t *x = m->digits + chunk * m->all_rows * (are_floats ? CHUNK : PAIRS) + part * depth;
    if (are_floats) {
        if (number % 2) MULTIPLY_FLOATS(1, 7);
        else MULTIPLY_FLOATS(0, 6);
    } else {
        if (number % 2) MULTIPLY_BYTES(2, 3, 5);
        else MULTIPLY_BYTES(0, 1, 4);
    }
}

/* As end_sums, but that the sums so far stay in registers from chunk to chunk. */
INLINE void scale_group(const int are_floats, const int rows, const int vectors, const int has_minima,
                        const struct chunk *c, int group, int v, const float *scales, const float *below,
                        const union group_sums *s, vec so_far[16]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; i++) {
            vec sum = are_floats ? s->floats[r]
                                 : __builtin_convertvector((s->integers[i][2 * r] << 8) + s->integers[i][2 * r + 1], vec);
            vec *to = &so_far[r * vectors + i];
            *to = multiply_add(sum * splat(scales[r]), c->scales[group][v + i], *to);
            if (has_minima) *to = multiply_add(splat(below[r]), c->minima[group][v + i], *to);
        }
}

/* `rows` as compiled for, of which `count` exist; in bytes two vectors at a time. */
INLINE void multiply_some(const int are_floats, const int rows, const int groups, const int has_minima,
                          const struct many *m, int count, int chunks, struct reading *next, float *out) {
    const int vectors = are_floats ? 1 : CODED_VECTORS;
    for (int v = 0; v < CODED_VECTORS; v += vectors) {
        union group_sums sums[2];
        vec so_far[16];
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++) {
            int row = i / vectors < count ? i / vectors : 0;
            so_far[i] = load(out, row * CODED_COLUMNS + (v + i % vectors) * LANES, LANES, FLOAT32);
        }
        multiply_group(are_floats, groups, m, v, 0, &sums[0]);
        for (int i = 0; i < chunks * groups; i++) {
            if (v == 0 && i % groups == 0) fetch_some(next);
            if (i + 1 < chunks * groups) multiply_group(are_floats, groups, m, v, i + 1, &sums[(i + 1) % 2]);
            int64_t at = i / groups * m->all_rows;
            scale_group(are_floats, rows, vectors, has_minima, &m->wide[i / groups].chunk, i % groups, v, m->scales + at,
                        m->below[i % groups] + at, &sums[i % 2], so_far);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++)
            if (i / vectors < count)
                memcpy(out + i / vectors * CODED_COLUMNS + (v + i % vectors) * LANES, &so_far[i], sizeof(vec));
    }
}

INLINE void multiply_any(const int groups, const int has_minima, int are_floats, const struct many *m, int rows, int chunks,
                         struct reading *next, float *out) {
    if (are_floats) {
        if (rows > 8) multiply_some(1, 16, groups, has_minima, m, rows, chunks, next, out);
        else if (rows > 4) multiply_some(1, 8, groups, has_minima, m, rows, chunks, next, out);
        else multiply_some(1, 4, groups, has_minima, m, rows, chunks, next, out);
    } else {
        if (rows > 4) multiply_some(0, 8, groups, has_minima, m, rows, chunks, next, out);
        else multiply_some(0, 4, groups, has_minima, m, rows, chunks, next, out);
    }
}

static void multiply_many(int rows, const struct coded *l, int64_t row, int64_t number, int chunks,
                          const struct wide_chunk *w, struct reading *next, float *out) {
    int are_floats = l->sums_are_floats;
    int64_t at = number * l->x.rows + row;
    struct many m = {.all_rows = l->x.rows, .scales = l->x.scales + at, .wide = w,
                     .below = {below_of(l, 0) + at, below_of(l, 1) + at},
                     .digits = are_floats ? l->x.floats + at * CHUNK : l->x.bytes + at * PAIRS};
    switch (l->type->groups * 2 + l->type->minima) {
    case 2: multiply_any(1, 0, are_floats, &m, rows, chunks, next, out); break;
    case 3: multiply_any(1, 1, are_floats, &m, rows, chunks, next, out); break;
    case 4: multiply_any(2, 0, are_floats, &m, rows, chunks, next, out); break;
    default: multiply_any(2, 1, are_floats, &m, rows, chunks, next, out);
    }
}
