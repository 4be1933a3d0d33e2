/* Linear layers with quantized weights (codes.h), compiled once per level.
 *
 * Activations are quantized to integers up to MAX_INTEGER with one scale per chunk, more precisely than in bfloat16.
 * The products of 16 or 32 neighbours in depth are summed exactly, as integers; these sums are scaled and added as
 * floats in depth order, so an output is bitwise independent of the other rows. */

#define WIDE_CHUNKS 8        /* chunks that are widened at a time */
#define MAX_INTEGER 32512    /* 256 * 127: both bytes are signed */
#define MIN_MAGNITUDE 1e-30f /* a chunk whose largest activation is smaller is quantized to 0 */

#if HAS_VNNI
#define MAX_BYTE_ROWS 16 /* for up to this many rows, products are computed from bytes … */
#define ROWS_PER_UNPACK ROWS /* … and this many rows share the unpacking of the codes */
#else
#define MAX_BYTE_ROWS 2
#define ROWS_PER_UNPACK 1
#endif
#define PANEL_VECTORS 2
#define PANEL_COLUMNS (PANEL_VECTORS * LANES)

/* Prevent compilers from computing all products before the additions, which would need too many registers. */
#define KEEP_ORDER(x) __asm__("" : "+v"(x))

typedef int16_t shorts_of_lanes __attribute__((vector_size(2 * LANES)));

/* Return c plus, in each lane, the two products of the pairs of int16 in a and b. The fused instruction has a longer
 * latency, which a few independent sums do not hide. */
INLINE ivec add_products(pairs a, pairs b, ivec c, int has_few_sums) {
#if HAS_VNNI
    if (!has_few_sums) return (ivec)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
    return c + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return c + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

/* Replace 4-bit codes, one per 16-bit lane, by their values in the table. */
INLINE pairs look_up(const uint8_t *table, pairs codes) {
#if LANES == 16
    return (pairs)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), (__m512i)codes);
#else
    return (pairs)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)),
                                      (__m256i)codes);
#endif
}

INLINE vec load_header(const uint8_t *from, int is_bfloat16) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    if (is_bfloat16) return widen(bits);
#if LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#else
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#endif
}

INLINE vec load_signed_bytes(const uint8_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
#else
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
#endif
}

/* One chunk of a panel. */
struct chunk {
    const uint8_t *planes;
    vec scales[2][PANEL_VECTORS], minima[2][PANEL_VECTORS]; /* by group */
};

/* The data to prefetch: the remaining `left` chunks of a panel, then `next_panel`. One chunk is prefetched per chunk
 * computed, so that memory is busy during the computation. */
struct prefetch {
    const uint8_t *from, *next_panel;
    int64_t size, left; /* size: bytes of a chunk; 0: prefetch nothing */
};

INLINE void prefetch_chunk(struct prefetch *next) {
    if (next->left-- == 0) next->from = next->next_panel;
    for (int64_t at = 0; at < next->size; at += 64) __builtin_prefetch(next->from + at);
    next->from += next->size;
}

static __attribute__((noinline)) void load_chunk(const struct code_type *t, const uint8_t *panel, int64_t index,
                                                 struct chunk *c) {
    const uint8_t *header = panel + header_at(t, index, PANEL_COLUMNS);
    c->planes = panel + chunk_at(t, index, PANEL_COLUMNS);
    const uint8_t *inner = c->planes + 4 * (t->low + t->high) * PANEL_COLUMNS;
    for (int v = 0; v < PANEL_VECTORS; v++) {
        vec scale = load_header(header + 2 * v * LANES, t->is_bfloat16), minimum = {0};
        if (t->has_minima) minimum = load_header(header + 2 * (PANEL_COLUMNS + v * LANES), t->is_bfloat16);
        for (int group = 0; group < t->groups; group++) {
            c->scales[group][v] = scale, c->minima[group][v] = minimum;
            if (!t->has_inner) continue;
            const uint8_t *at = inner + group * PANEL_COLUMNS + v * LANES;
            c->scales[group][v] *= load_signed_bytes(at);
            if (t->has_minima) c->minima[group][v] *= load_signed_bytes(at + t->groups * PANEL_COLUMNS);
        }
    }
}

/* Load pair `i` of a chunk from a plane of `bits` bits per code, in 16-bit lanes; with `as_bytes` the four codes `i`, to be
 * multiplied by four bytes of an input. */
INLINE pairs load_codes(const uint8_t *plane, const int bits, const int as_bytes, const int i, const int v) {
    const int word_at = (as_bytes ? i : i / 2) * bits, shift = word_at % 8 + (as_bytes ? 0 : i % 2 * 8);
    pairs word;
    memcpy(&word, plane + 4 * (word_at / 8 * PANEL_COLUMNS + v * LANES), sizeof word);
    return word >> (uint16_t)shift & (uint16_t)((as_bytes ? 0x101 : 1) * ((1 << bits) - 1));
}

INLINE pairs load_values(const uint8_t *planes, const int low, const int high, const uint8_t *table, const int as_bytes,
                         const int i, const int v) {
    pairs codes = load_codes(planes, low, as_bytes, i, v);
    if (high) codes |= load_codes(planes + 4 * low * PANEL_COLUMNS, high, as_bytes, i, v) << (uint16_t)low;
    return table ? look_up(table, codes) : codes;
}

/* Integer sums of products, by row and vector. */
struct sums {
    ivec of[ROWS][PANEL_VECTORS];
};

/* Return the sum of a row's integers in one group of a chunk; `at` is the index of the row's chunk. */
INLINE int32_t sum_of_inputs(const struct quantized_linear *l, int64_t at, int group) {
    const int32_t *parts = l->x.sums + 2 * at;
    return l->type->groups == 2 ? parts[group] : parts[0] + parts[1];
}

/* Return what a minimum of 1 adds to each row of each chunk. */
INLINE const float *negative_sums_of(const struct quantized_linear *l, int group) {
    return l->x.negative_sums[l->type->groups == 2 ? 1 + group : 0];
}

/* Zero the sums or, with `subtracts_offset`, subtract in advance what the codes' offset will add to them. */
INLINE void init_sums(const int rows, const int subtracts_offset, const struct quantized_linear *l, int64_t at,
                      int group, struct sums *s) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++)
            s->of[r][v] = (ivec){0} - (subtracts_offset ? l->type->offset * sum_of_inputs(l, at + r, group) : 0);
}

INLINE void add_pair(const int rows, const uint32_t *x, const pairs codes[PANEL_VECTORS], struct sums *s) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        pairs factor = (pairs)((uvec){0} + x[r * (CHUNK / 2)]);
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++) {
            s->of[r][v] = add_products(factor, codes[v], s->of[r][v], rows < 4);
            KEEP_ORDER(s->of[r][v]);
        }
    }
}

INLINE void add_scaled_sums(const int rows, const struct quantized_linear *l, int64_t at, const struct chunk *c,
                            int group, const struct sums *s, float *out) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float scale = l->x.scales[at + r], negative_sums = negative_sums_of(l, group)[at + r];
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++) {
            vec so_far = load(out, r * PANEL_COLUMNS + v * LANES, LANES, FLOAT32);
            vec scaled = __builtin_convertvector(s->of[r][v], vec) * splat(scale);
            so_far = multiply_add(scaled, c->scales[group][v], so_far);
            if (l->type->has_minima) so_far = multiply_add(splat(negative_sums), c->minima[group][v], so_far);
            memcpy(out + r * PANEL_COLUMNS + v * LANES, &so_far, sizeof so_far);
        }
    }
}

#if !HAS_VNNI
/* Return c plus, in each 16-bit lane, the two products of a's unsigned and b's signed bytes. */
INLINE pairs add_byte_products(pairs a, pairs b, pairs c) {
    return c + (pairs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
#endif

/* Add the products of a group's codes with the lower bytes of some rows, and with the upper bytes times 256. Without
 * VNNI, which sums four products, pairs of products are summed in 16 bits, as many as codes of up to 6 bits allow. */
INLINE void add_quads(const int rows, const int low, const int high, const uint8_t *table, const int first,
                      const int end, const uint8_t *planes, const uint32_t *x, struct sums *s) {
#if HAS_VNNI
    ivec upper[ROWS_PER_UNPACK][PANEL_VECTORS] = {{{0}}};
#else
    const pairs ones = (pairs){0} + 1;
    pairs upper[ROWS_PER_UNPACK][PANEL_VECTORS] = {{{0}}}, lower[ROWS_PER_UNPACK][PANEL_VECTORS] = {{{0}}};
#endif
#pragma GCC unroll 8
    for (int i = first; i < end; i++) {
        pairs values[PANEL_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++) values[v] = load_values(planes, low, high, table, 1, i, v);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const uint32_t *bytes = x + r * (CHUNK / 2) + i;
            pairs x_upper = (pairs)((uvec){0} + bytes[0]), x_lower = (pairs)((uvec){0} + bytes[CHUNK / 4]);
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECTORS; v++) {
#if HAS_VNNI
                upper[r][v] = (ivec)_mm512_dpbusd_epi32((__m512i)upper[r][v], (__m512i)values[v], (__m512i)x_upper);
                s->of[r][v] = (ivec)_mm512_dpbusd_epi32((__m512i)s->of[r][v], (__m512i)values[v], (__m512i)x_lower);
                KEEP_ORDER(s->of[r][v]);
#else
                upper[r][v] = add_byte_products(values[v], x_upper, upper[r][v]);
                lower[r][v] = add_byte_products(values[v], x_lower, lower[r][v]);
                KEEP_ORDER(lower[r][v]);
#endif
                KEEP_ORDER(upper[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++) {
#if HAS_VNNI
            s->of[r][v] += upper[r][v] << 8;
#else
            s->of[r][v] = add_products(lower[r][v], ones, s->of[r][v], 1);
            s->of[r][v] = add_products(upper[r][v], ones * 256, s->of[r][v], 1);
#endif
        }
}

/* Multiply some rows by the codes of a panel as bytes. Without VNNI, where it is one row, codes whose byte products do not
 * fit into 16 bits are widened to 16 bits in registers. */
INLINE void multiply_codes(const int low, const int high, const int groups, const uint8_t *table, const int rows,
                           const struct quantized_linear *l, int64_t row, const uint8_t *panel, struct prefetch *next,
                           float *out) {
    const int as_bytes = HAS_VNNI || (low < 8 && !table);
    const int quads = 8 / groups, at_once = HAS_VNNI || low + high < 5 ? quads : low + high == 5 ? 4 : 2;
    for (int64_t index = 0; index < l->depth / CHUNK; index++) {
        struct chunk c;
        prefetch_chunk(next);
        load_chunk(l->type, panel, index, &c);
        int64_t at = index * l->x.rows + row;
        const uint32_t *x = as_bytes ? l->x.bytes + at * (CHUNK / 2) : (const uint32_t *)(l->x.values + at * CHUNK);
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) {
            struct sums s;
            init_sums(rows, 1, l, at, group, &s);
            if (as_bytes) {
#pragma GCC unroll 8
                for (int first = group * quads; first < (group + 1) * quads; first += at_once)
                    add_quads(rows, low, high, table, first, first + at_once, c.planes, x, &s);
            } else {
#pragma GCC unroll 16
                for (int i = group * 2 * quads; i < (group + 1) * 2 * quads; i++) {
                    pairs codes[PANEL_VECTORS];
#pragma GCC unroll 2
                    for (int v = 0; v < PANEL_VECTORS; v++) codes[v] = load_values(c.planes, low, high, table, 0, i, v);
                    add_pair(rows, x + i, codes, &s);
                }
            }
            add_scaled_sums(rows, l, at, &c, group, &s, out);
        }
    }
}

INLINE void multiply_rows_of_type(const int rows, const struct quantized_linear *l, int64_t row, const uint8_t *panel,
                                  struct prefetch *next, float *out) {
    BY_BITS(l->type, multiply_codes, rows, l, row, panel, next, out);
}

static void multiply_few(int rows, const struct quantized_linear *l, int64_t row, const uint8_t *panel,
                         struct prefetch *next, float *out) {
#if ROWS_PER_UNPACK > 1
    BY_ROWS(rows, multiply_rows_of_type, l, row, panel, next, out);
#else
    multiply_rows_of_type(1, l, row, panel, next, out);
#endif
}

/* A chunk with its values (the offset subtracted), widened to 16 bits once for many rows. */
struct wide_chunk {
    struct chunk chunk;
    pairs codes[CHUNK / 2][PANEL_VECTORS];
};

INLINE void widen_codes(const int low, const int high, const int groups, const uint8_t *table,
                        const struct quantized_linear *l, const uint8_t *planes,
                        pairs out[CHUNK / 2][PANEL_VECTORS]) {
    const pairs offset = (pairs){0} + (uint16_t)l->type->offset;
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK / 2; i++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++) out[i][v] = load_values(planes, low, high, table, 0, i, v) - offset;
}

INLINE void multiply_wide(const int rows, const struct quantized_linear *l, int64_t row, int64_t index, int count,
                          const struct wide_chunk *w, struct prefetch *next, float *out) {
    for (int64_t at = index * l->x.rows + row; count--; at += l->x.rows, w++) {
        prefetch_chunk(next);
        const uint32_t *x = (const uint32_t *)(l->x.values + at * CHUNK);
        struct sums s;
        for (int half = 0; half < 2; half++) {
            if (!half || l->type->groups == 2) init_sums(rows, 0, l, at, half, &s);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) add_pair(rows, x + half * 8 + i, w->codes[half * 8 + i], &s);
            if (half || l->type->groups == 2)
                add_scaled_sums(rows, l, at, &w->chunk, l->type->groups == 2 && half, &s, out);
        }
    }
}

static void widen_chunk(const struct quantized_linear *l, const uint8_t *panel, int64_t index, struct wide_chunk *out) {
    load_chunk(l->type, panel, index, &out->chunk);
    BY_BITS(l->type, widen_codes, l, out->chunk.planes, out->codes);
}

/* Return how many of `left` rows to process next, at most `most`, so that all batches have nearly the same size. */
INLINE int balanced_rows(int left, int most) { return left / ((left + most - 1) / most); }

/* Compute parts [first, end): part p is panel p / row_parts and row part p % row_parts. */
INLINE void quantized_linear_parts(const struct quantized_linear *l, int64_t first, int64_t end, enum element type) {
    struct wide_chunk wide[WIDE_CHUNKS];
    float sums[LINEAR_ROWS * PANEL_COLUMNS];
    int64_t chunks = l->depth / CHUNK, size = panel_bytes(l->type, l->depth, PANEL_COLUMNS);
    for (int64_t part = first; part < end; part++) {
        int64_t block = part / l->row_parts, row = part % l->row_parts * LINEAR_ROWS;
        int rows = (int)(l->rows - row < LINEAR_ROWS ? l->rows - row : LINEAR_ROWS);
        row += l->first_row;
        const uint8_t *panel = l->weight + block * size;
        memset(sums, 0, sizeof *sums * rows * PANEL_COLUMNS);
        int64_t next_panel = (part + 1 + (part + 1 < end ? 0 : l->parts_between)) / l->row_parts * size;
        struct prefetch next = {panel + WIDE_CHUNKS * (size / chunks), l->weight + next_panel, size / chunks,
                                      chunks - WIDE_CHUNKS};
        if (l->x.uses_bytes)
            for (int r = 0, some; r < rows; r += some, next.size = 0) {
                some = balanced_rows(rows - r, ROWS_PER_UNPACK);
                multiply_few(some, l, row + r, panel, &next, sums + r * PANEL_COLUMNS);
            }
        else
            for (int64_t index = 0; index < chunks; index += WIDE_CHUNKS) {
                int count = (int)(chunks - index < WIDE_CHUNKS ? chunks - index : WIDE_CHUNKS);
                for (int i = 0; i < count; i++) widen_chunk(l, panel, index + i, wide + i);
                struct prefetch nothing = {0};
                for (int r = 0, some; r < rows; r += some) {
                    some = balanced_rows(rows - r, ROWS);
                    BY_ROWS(some, multiply_wide, l, row + r, index, count, wide, r ? &nothing : &next,
                            sums + r * PANEL_COLUMNS);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0, at = block * PANEL_COLUMNS; i < PANEL_COLUMNS && at < l->width;
                 i += LANES, at += LANES) {
                vec y = load(sums, r * PANEL_COLUMNS + i, LANES, FLOAT32);
                if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
                store(l->y, (row + r) * l->y_stride + at, l->width - at, y, type);
            }
    }
}

IN_BOTH_TYPES(quantized_linear, quantized_linear_parts, RANGE_PARAMETERS, op, first, end)

/* Split the integers of a chunk into upper and lower bytes. */
INLINE void split_to_bytes(const int16_t *values, uint32_t *bytes) {
    typedef int16_t all_shorts __attribute__((vector_size(2 * CHUNK)));
    typedef int8_t all_bytes __attribute__((vector_size(CHUNK)));
    all_shorts whole;
    memcpy(&whole, values, sizeof whole);
    all_bytes both[2] = {__builtin_convertvector((whole + 128) >> 8, all_bytes),
                         __builtin_convertvector(whole, all_bytes)};
    for (int i = 0; i < 2; i++) {
        all_bytes h = both[i]; /* in the order of BYTE_OF */
        h = __builtin_shufflevector(h, h, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 16, 18, 17, 19, 20, 22,
                                    21, 23, 24, 26, 25, 27, 28, 30, 29, 31);
        memcpy(bytes + i * (CHUNK / 4), &h, sizeof h);
    }
}

/* Quantize rows of activations. A chunk with an infinity or a NaN gets NaN as its scale. */
INLINE void quantize_rows(const struct quantize *q, int64_t first, int64_t end, enum element type) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int64_t row = first; row < end; row++)
        for (int64_t at = 0; at < q->depth; at += CHUNK) {
            vec x[CHUNK / LANES], top = {0}, zero = {0};
            for (int i = 0; i < CHUNK / LANES; i++) {
                x[i] = load(q->x, row * q->x_stride + at + i * LANES, LANES, type);
                top = larger(top, (vec)((uvec)x[i] & 0x7fffffff));
                zero += x[i] - x[i];
            }
            float largest = largest_lane(top), by = largest < MIN_MAGNITUDE ? 0 : MAX_INTEGER / largest;
            int64_t chunk = at / CHUNK * q->out.rows + row;
            int16_t own[CHUNK], *values = q->out.values ? q->out.values + chunk * CHUNK : own;
            vec half_sums[2] = {{0}}; /* exact */
            for (int i = 0; i < CHUNK / LANES; i++) {
                ivec whole = (ivec)(multiply_add(x[i], splat(by), magic)) - (ivec)magic;
                shorts_of_lanes narrow_ones = __builtin_convertvector(whole, shorts_of_lanes);
                memcpy(values + i * LANES, &narrow_ones, sizeof narrow_ones);
                whole = __builtin_convertvector(narrow_ones, ivec);
                half_sums[i * LANES / 16] += __builtin_convertvector(whole, vec);
            }
            if (q->out.bytes) split_to_bytes(values, q->out.bytes + chunk * (CHUNK / 2));
            float scale = largest / MAX_INTEGER + sum_lanes(zero);
            float sums[2] = {sum_lanes(half_sums[0]), sum_lanes(half_sums[1])};
            q->out.scales[chunk] = scale;
            q->out.negative_sums[0][chunk] = -(sums[0] + sums[1]) * scale;
            for (int half = 0; half < 2; half++) {
                q->out.sums[2 * chunk + half] = (int32_t)sums[half];
                q->out.negative_sums[1 + half][chunk] = -sums[half] * scale;
            }
        }
}

IN_BOTH_TYPES(quantize, quantize_rows, RANGE_PARAMETERS, op, first, end)

const struct quantized_kernels QUANTIZED = {
    .quantize = {quantize_float32, quantize_bfloat16},
    .linear = {quantized_linear_float32, quantized_linear_bfloat16},
    .panel_columns = PANEL_COLUMNS,
    .has_vnni = HAS_VNNI,
    .max_byte_rows = MAX_BYTE_ROWS,
};
