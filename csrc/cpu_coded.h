/* Linear layers over weights that are kept as codes (codes.h), compiled once per level.
 *
 * Inputs become integers up to LARGEST with one scale for 32 neighbours in depth, which is nearer to them than bfloat16.
 * Products are summed as integers, so exactly, for 16 or 32 of depth, and these sums are scaled and summed as floats in
 * ascending order: an output is the same bits whatever other rows there are. */

#define SPAN 8         /* chunks that are widened at a time */
#define LARGEST 32512  /* 256 · 127: both bytes are signed */
#define TINIEST 1e-30f /* below it everything is 0 */

#define CODED_ROWS 6 /* whose sums stay in registers */
#if HAS_VNNI
#define FEW_ROWS 16 /* are multiplied a digit at a time … */
#define AT_ONCE CODED_ROWS /* … with so many sharing what codes take to be read */
#else
#define FEW_ROWS 2
#define AT_ONCE 1
#endif
#define CODED_VECTORS 2
#define CODED_COLUMNS (CODED_VECTORS * LANES)

/* Compilers would put all products first and add them behind, which takes more registers than there are. */
#define KEEP_ORDER(x) __asm__("" : "+v"(x))

typedef int16_t shorts_of_lanes __attribute__((vector_size(2 * LANES)));

/* c plus, in every lane, the two products of the pairs of int16 in a and b. One instruction for both waits longer for
 * the sum before it, which few sums cannot hide. */
INLINE ivec add_products(pairs a, pairs b, ivec c, int is_one_of_few) {
#if HAS_VNNI
    if (!is_one_of_few) return (ivec)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
    return c + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return c + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

/* The table's values for codes of four bits in 16 each. */
INLINE pairs look_up(const uint8_t *table, pairs codes) {
#if LANES == 16
    return (pairs)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), (__m512i)codes);
#else
    return (pairs)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)),
                                      (__m256i)codes);
#endif
}

INLINE vec header_numbers(const uint8_t *from, int is_bfloat16) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    if (is_bfloat16) return widen(bits);
#if LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#else
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#endif
}

INLINE vec signed_bytes(const uint8_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
#else
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
#endif
}

/* The parts of a chunk of a panel. */
struct chunk {
    const uint8_t *planes;
    vec scales[2][CODED_VECTORS], minima[2][CODED_VECTORS]; /* by group */
};

/* The data to prefetch: the remaining `left` chunks of a panel, then another panel. It is prefetched chunk by chunk,
 * because memory would otherwise be idle while products are computed. */
struct reading {
    const uint8_t *from, *then;
    int64_t size, left; /* bytes of a chunk; 0: nothing */
};

INLINE void fetch_some(struct reading *next) {
    if (next->left-- == 0) next->from = next->then;
    for (int64_t at = 0; at < next->size; at += 64) __builtin_prefetch(next->from + at);
    next->from += next->size;
}

static __attribute__((noinline)) void find_chunk(const struct code_type *t, const uint8_t *panel, int64_t number,
                                                 struct chunk *c) {
    const uint8_t *header = panel + header_at(t, number, CODED_COLUMNS);
    c->planes = panel + chunk_at(t, number, CODED_COLUMNS);
    const uint8_t *inner = c->planes + 4 * (t->low + t->high) * CODED_COLUMNS;
    for (int v = 0; v < CODED_VECTORS; v++) {
        vec scale = header_numbers(header + 2 * v * LANES, t->is_bfloat16), minimum = {0};
        if (t->minima) minimum = header_numbers(header + 2 * (CODED_COLUMNS + v * LANES), t->is_bfloat16);
        for (int group = 0; group < t->groups; group++) {
            c->scales[group][v] = scale, c->minima[group][v] = minimum;
            if (!t->inner) continue;
            const uint8_t *at = inner + group * CODED_COLUMNS + v * LANES;
            c->scales[group][v] *= signed_bytes(at);
            if (t->minima) c->minima[group][v] *= signed_bytes(at + t->groups * CODED_COLUMNS);
        }
    }
}

/* Pair i of a chunk in a plane of so many bits. */
INLINE pairs plane_pair(const uint8_t *plane, const int bits, const int i, const int v) {
    pairs word;
    memcpy(&word, plane + 4 * (i / 2 * bits / 8 * CODED_COLUMNS + v * LANES), sizeof word);
    return word >> (uint16_t)(i / 2 * bits % 8 + i % 2 * 8) & (uint16_t)((1 << bits) - 1);
}

INLINE pairs code_pair(const uint8_t *planes, const int low, const int high, const uint8_t *table, const int i,
                       const int v) {
    pairs code = plane_pair(planes, low, i, v);
    if (high) code |= plane_pair(planes + 4 * low * CODED_COLUMNS, high, i, v) << (uint16_t)low;
    return table ? look_up(table, code) : code;
}

/* Sums of products of rows with some pairs of a chunk. */
struct sums {
    ivec of[CODED_ROWS][CODED_VECTORS];
};

/* Returns the sum of a row's integers in one group of a chunk; `at` is the index of the row's chunk among all. */
INLINE int32_t sum_of_integers(const struct coded *l, int64_t at, int group) {
    const int32_t *parts = l->x.sums + 2 * at;
    return l->type->groups == 2 ? parts[group] : parts[0] + parts[1];
}

/* Returns the amounts that a minimum of 1 subtracts from each row. */
INLINE const float *below_of(const struct coded *l, int group) {
    return l->x.below[l->type->groups == 2 ? 1 + group : 0];
}

/* `has_offset`: what codes' offset adds to all products of a row together is taken away in advance. */
INLINE void begin_sums(const int rows, const int has_offset, const struct coded *l, int64_t at, int group, struct sums *s) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++)
            s->of[r][v] = (ivec){0} - (has_offset ? l->type->offset * sum_of_integers(l, at + r, group) : 0);
}

INLINE void add_pair(const int rows, const uint32_t *x, const pairs codes[CODED_VECTORS], struct sums *s) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        pairs factor = (pairs)((uvec){0} + x[r * (CHUNK / 2)]);
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) {
            s->of[r][v] = add_products(factor, codes[v], s->of[r][v], rows < 4);
            KEEP_ORDER(s->of[r][v]);
        }
    }
}

INLINE void end_sums(const int rows, const struct coded *l, int64_t at, const struct chunk *c, int group,
                     const struct sums *s, float *out) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float scale = l->x.scales[at + r], below = below_of(l, group)[at + r];
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) {
            vec so_far = load(out, r * CODED_COLUMNS + v * LANES, LANES, FLOAT32);
            vec scaled = __builtin_convertvector(s->of[r][v], vec) * splat(scale);
            so_far = multiply_add(scaled, c->scales[group][v], so_far);
            if (l->type->minima) so_far = multiply_add(splat(below), c->minima[group][v], so_far);
            memcpy(out + r * CODED_COLUMNS + v * LANES, &so_far, sizeof so_far);
        }
    }
}

/* Four codes at a time, which meet the bytes of an input. */
INLINE pairs code_quad(const uint8_t *planes, const int bits, const int i, const int v) {
    pairs word;
    memcpy(&word, planes + 4 * (i * bits / 8 * CODED_COLUMNS + v * LANES), sizeof word);
    return word >> (uint16_t)(i * bits % 8) & (uint16_t)(0x101 * ((1 << bits) - 1));
}

INLINE pairs value_quad(const uint8_t *planes, const int low, const int high, const uint8_t *table, const int i,
                        const int v) {
    pairs codes = code_quad(planes, low, i, v);
    if (high) codes |= code_quad(planes + 4 * low * CODED_COLUMNS, high, i, v) << (uint16_t)low;
    return table ? look_up(table, codes) : codes;
}

#if !HAS_VNNI
/* c plus, in lanes of 16 bits, the products of a's bytes, unsigned, with b's, signed, two and two. */
INLINE pairs add_byte_products(pairs a, pairs b, pairs c) {
    return c + (pairs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
#endif

/* Products of a group's codes with the upper bytes of a few rows, times 256, and with the lower ones. Without an instruction
 * that sums four, sums of two take 16 bits for as many of them as fit, with codes of up to six bits. */
INLINE void add_quads(const int rows, const int low, const int high, const uint8_t *table, const int first, const int end,
                      const uint8_t *planes, const uint32_t *x, struct sums *s) {
#if HAS_VNNI
    ivec upper[AT_ONCE][CODED_VECTORS] = {{{0}}};
#else
    const pairs ones = (pairs){0} + 1;
    pairs upper[AT_ONCE][CODED_VECTORS] = {{{0}}}, lower[AT_ONCE][CODED_VECTORS] = {{{0}}};
#endif
#pragma GCC unroll 8
    for (int i = first; i < end; i++) {
        pairs values[CODED_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < CODED_VECTORS; v++) values[v] = value_quad(planes, low, high, table, i, v);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const uint32_t *bytes = x + r * (CHUNK / 2) + i;
            pairs x_upper = (pairs)((uvec){0} + bytes[0]), x_lower = (pairs)((uvec){0} + bytes[CHUNK / 4]);
#pragma GCC unroll 2
            for (int v = 0; v < CODED_VECTORS; v++) {
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
        for (int v = 0; v < CODED_VECTORS; v++) {
#if HAS_VNNI
            s->of[r][v] += upper[r][v] << 8;
#else
            s->of[r][v] = add_products(lower[r][v], ones, s->of[r][v], 1);
            s->of[r][v] = add_products(upper[r][v], ones * 256, s->of[r][v], 1);
#endif
        }
}

INLINE void multiply_quads(const int rows, const int low, const int high, const int groups, const uint8_t *table,
                           const struct coded *l, int64_t row, const uint8_t *panel, struct reading *next, float *out) {
    const int quads = 8 / groups, at_once = HAS_VNNI || low + high < 5 ? quads : low + high == 5 ? 4 : 2;
    for (int64_t number = 0; number < l->depth / CHUNK; number++) {
        struct chunk c;
        fetch_some(next);
        find_chunk(l->type, panel, number, &c);
        int64_t at = number * l->x.rows + row;
        const uint32_t *x = l->x.bytes + at * (CHUNK / 2);
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) {
            struct sums s;
            begin_sums(rows, 1, l, at, group, &s);
#pragma GCC unroll 8
            for (int first = group * quads; first < (group + 1) * quads; first += at_once)
                add_quads(rows, low, high, table, first, first + at_once, c.planes, x, &s);
            end_sums(rows, l, at, &c, group, &s, out);
        }
    }
}

#if !HAS_VNNI
/* A row of other codes: they are widened in registers. */
INLINE void multiply_one(const int rows, const int low, const int high, const int groups, const uint8_t *table,
                         const struct coded *l, int64_t row, const uint8_t *panel, struct reading *next, float *out) {
    for (int64_t number = 0; number < l->depth / CHUNK; number++) {
        struct chunk c;
        fetch_some(next);
        find_chunk(l->type, panel, number, &c);
        int64_t at = number * l->x.rows + row;
        const uint32_t *x = (const uint32_t *)(l->x.values + at * CHUNK);
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) {
            struct sums s;
            begin_sums(1, 1, l, at, group, &s);
#pragma GCC unroll 16
            for (int i = group * 16 / groups; i < (group + 1) * 16 / groups; i++) {
                pairs codes[CODED_VECTORS];
#pragma GCC unroll 2
                for (int v = 0; v < CODED_VECTORS; v++) codes[v] = code_pair(c.planes, low, high, table, i, v);
                add_pair(1, x + i, codes, &s);
            }
            end_sums(1, l, at, &c, group, &s, out);
        }
    }
}
#else
#define multiply_one multiply_quads /* all codes meet bytes */
#endif

INLINE void multiply_by_type(const int rows, const struct coded *l, int64_t row, const uint8_t *panel,
                             struct reading *next, float *out) {
    const uint8_t *table = l->type->table;
    switch (l->type->low * 4 + l->type->high) {
    case 8: multiply_quads(rows, 2, 0, 2, NULL, l, row, panel, next, out); break;
    case 9: multiply_quads(rows, 2, 1, 2, NULL, l, row, panel, next, out); break;
    case 16:
        if (table) multiply_one(rows, 4, 0, 1, table, l, row, panel, next, out);
        else multiply_quads(rows, 4, 0, 1, NULL, l, row, panel, next, out);
        break;
    case 17: multiply_quads(rows, 4, 1, 1, NULL, l, row, panel, next, out); break;
    case 18: multiply_quads(rows, 4, 2, 2, NULL, l, row, panel, next, out); break;
    default: multiply_one(rows, 8, 0, 1, NULL, l, row, panel, next, out);
    }
}

static void multiply_few(int rows, const struct coded *l, int64_t row, const uint8_t *panel, struct reading *next,
                         float *out) {
    switch (rows) {
    case 1: multiply_by_type(1, l, row, panel, next, out); break;
#if AT_ONCE > 1
    case 2: multiply_by_type(2, l, row, panel, next, out); break;
    case 3: multiply_by_type(3, l, row, panel, next, out); break;
    case 4: multiply_by_type(4, l, row, panel, next, out); break;
    case 5: multiply_by_type(5, l, row, panel, next, out); break;
    default: multiply_by_type(6, l, row, panel, next, out);
#endif
    }
}

/* A chunk and its codes, widened to 16 bits once for many rows, without their offset. */
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

static void widen_chunk(const struct coded *l, const uint8_t *panel, int64_t number, struct wide_chunk *out) {
    find_chunk(l->type, panel, number, &out->chunk);
    const uint8_t *planes = out->chunk.planes, *table = l->type->table;
    switch (l->type->low * 4 + l->type->high) {
    case 8: widen_codes(l, planes, 2, 0, NULL, out->codes); break;
    case 9: widen_codes(l, planes, 2, 1, NULL, out->codes); break;
    case 16:
        if (table) widen_codes(l, planes, 4, 0, table, out->codes);
        else widen_codes(l, planes, 4, 0, NULL, out->codes);
        break;
    case 17: widen_codes(l, planes, 4, 1, NULL, out->codes); break;
    case 18: widen_codes(l, planes, 4, 2, NULL, out->codes); break;
    default: widen_codes(l, planes, 8, 0, NULL, out->codes);
    }
}

/* How many of `left` rows to take, `most` at a time: as many each time, or one more. */
INLINE int in_turn(int left, int most) { return left / ((left + most - 1) / most); }

/* Parts [first, end): part p is panel p / row_parts, for row part p % row_parts. */
INLINE void coded_parts(const struct coded *l, int64_t first, int64_t end, enum element type) {
    struct wide_chunk wide[SPAN];
    float sums[LINEAR_ROWS * CODED_COLUMNS];
    int64_t chunks = l->depth / CHUNK, size = panel_bytes(l->type, l->depth, CODED_COLUMNS);
    for (int64_t part = first; part < end; part++) {
        int64_t block = part / l->row_parts, row = part % l->row_parts * LINEAR_ROWS;
        int rows = (int)(l->rows - row < LINEAR_ROWS ? l->rows - row : LINEAR_ROWS);
        row += l->first_row;
        const uint8_t *panel = l->weight + block * size;
        memset(sums, 0, sizeof *sums * rows * CODED_COLUMNS);
        int64_t then = (part + 1 + (part + 1 < end ? 0 : l->others)) / l->row_parts * size;
        struct reading next = {panel + SPAN * (size / chunks), l->weight + then, size / chunks, chunks - SPAN};
        if (l->x.is_few)
            for (int r = 0, some; r < rows; r += some, next.size = 0) {
                some = in_turn(rows - r, AT_ONCE);
                multiply_few(some, l, row + r, panel, &next, sums + r * CODED_COLUMNS);
            }
        else
            for (int64_t number = 0; number < chunks; number += SPAN) {
                int count = (int)(chunks - number < SPAN ? chunks - number : SPAN);
                for (int i = 0; i < count; i++) widen_chunk(l, panel, number + i, wide + i);
                struct reading nothing = {0};
                for (int r = 0, some; r < rows; r += some) {
                    some = in_turn(rows - r, CODED_ROWS);
                    multiply_many(some, l, row + r, number, count, wide, r ? &nothing : &next,
                                  sums + r * CODED_COLUMNS);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0, at = block * CODED_COLUMNS; i < CODED_COLUMNS && at < l->width;
                 i += LANES, at += LANES) {
                vec y = load(sums, r * CODED_COLUMNS + i, LANES, FLOAT32);
                if (l->bias) y += load(l->bias, at, l->width - at, FLOAT32);
                store(l->y, (row + r) * l->y_stride + at, l->width - at, y, type);
            }
    }
}

IN_BOTH_TYPES(coded, coded_parts, OF_ITEMS, op, first, end)

/* A chunk's integers as bytes. */
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

/* Rows of inputs as integers. A row with an infinity or a NaN has a NaN for a scale. */
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
            float largest = largest_lane(top), by = largest < TINIEST ? 0 : LARGEST / largest;
            int64_t chunk = at / CHUNK * q->to.rows + row;
            int16_t own[CHUNK], *values = q->to.values ? q->to.values + chunk * CHUNK : own;
            vec half_sums[2] = {{0}}; /* their sums are exact */
            for (int i = 0; i < CHUNK / LANES; i++) {
                ivec whole = (ivec)(multiply_add(x[i], splat(by), magic)) - (ivec)magic;
                shorts_of_lanes narrow_ones = __builtin_convertvector(whole, shorts_of_lanes);
                memcpy(values + i * LANES, &narrow_ones, sizeof narrow_ones);
                whole = __builtin_convertvector(narrow_ones, ivec);
                half_sums[i * LANES / 16] += __builtin_convertvector(whole, vec);
            }
            if (q->to.bytes) split_to_bytes(values, q->to.bytes + chunk * (CHUNK / 2));
            float scale = largest / LARGEST + sum_lanes(zero);
            float sums[2] = {sum_lanes(half_sums[0]), sum_lanes(half_sums[1])};
            q->to.scales[chunk] = scale;
            q->to.below[0][chunk] = -(sums[0] + sums[1]) * scale;
            for (int half = 0; half < 2; half++) {
                q->to.sums[2 * chunk + half] = (int32_t)sums[half];
                q->to.below[1 + half][chunk] = -sums[half] * scale;
            }
        }
}

IN_BOTH_TYPES(quantize, quantize_rows, OF_ITEMS, op, first, end)
