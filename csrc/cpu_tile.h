/* Repacking of a tile of one KV head from its pages into the layout that the product needs, compiled once per level.
 * Keys are transposed, so that a vector holds one word of many keys; values become pairs of adjacent positions if the
 * product uses pairs. This costs about as much as the attention of eight rows to the tile. */

#define TYPE_BYTES(type) ((type) == BFLOAT16 ? 2 : 4)

/* A word is a float or, for bfloat16 with HAS_BF16, a pair of them: two dimensions in q and keys, two positions in
 * values and weights. */
struct shape {
    int paired; /* words are pairs of bfloat16 */
    int head_dim;
    int depth; /* words of a key */
    int width; /* head_dim rounded up to whole vectors */
    int group; /* query heads per KV head */
};

INLINE struct shape shape_of(const struct penstock_attention *a, enum element type) {
    int paired = HAS_BF16 && type == BFLOAT16;
    return (struct shape){.paired = paired,
                          .head_dim = a->head_dim,
                          .depth = paired ? a->head_dim / 2 : a->head_dim,
                          .width = (a->head_dim + LANES - 1) / LANES * LANES,
                          .group = a->q_heads / a->kv_heads};
}

/* The addresses of a head's keys and values in the current and the next tile, indexed by position modulo two tiles. */
struct positions {
    int end; /* positions below this are known */
    const void *keys[2 * TILE], *values[2 * TILE];
};

/* Look up the addresses of positions [begin, end), at most one tile. */
INLINE void find_positions(const struct penstock_attention *a, int row, int kv_head, int begin, int end, struct positions *p,
                           enum element type) {
    p->end = end - begin < TILE ? end : begin + TILE;
    const int32_t *block = a->block_tables + row * a->table_stride + begin / a->page_size;
    for (int i = begin, offset = begin % a->page_size; i < p->end; block++, offset = 0) {
        int64_t slot = *block * a->page_stride + offset * a->slot_stride + (int64_t)kv_head * a->head_dim;
        for (; offset < a->page_size && i < p->end; offset++, i++, slot += a->slot_stride) {
            p->keys[i % (2 * TILE)] = element_at(a->k_pages, slot, type);
            p->values[i % (2 * TILE)] = element_at(a->v_pages, slot, type);
        }
    }
}

/* A head's data in a page is one or two cache lines every few hundred bytes, which hardware prefetching does not
 * detect. Prefetching so many positions ahead reads a context outside the caches twice as fast. */
#define AHEAD 64

INLINE void prefetch(const void *const *rows, int begin, int count, int end, int head_dim, enum element type) {
    for (int i = begin; i < begin + count && i < end; i++)
        for (int at = 0; at < head_dim; at += 64 / TYPE_BYTES(type))
            __builtin_prefetch(element_at(rows[i % (2 * TILE)], at, type), 0, 2);
}

INLINE void transpose(vec x[LANES]) {
#pragma GCC unroll 4
    for (int round = LANES; round > 1; round /= 2) { /* each round interleaves the two halves of the rows */
        vec y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = ZIP_LOW(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = ZIP_HIGH(x[i], x[i + LANES / 2]);
        }
        memcpy(x, y, sizeof y);
    }
}

/* Load LANES words of a key from word `at` on, of which `left` exist. */
INLINE vec load_words(const void *key, int at, int left, int paired, enum element type) {
    return load(key, at, left, paired ? FLOAT32 : type);
}

/* Pack the keys of the tile at `begin`, up to `end`. */
INLINE void pack_keys(const struct shape s, const struct positions *p, int begin, int end, uint32_t *out,
                      enum element type) {
    for (int position = begin; position < end; position += LANES) {
        const void *const *keys = p->keys + position % (2 * TILE);
        int num_keys = end - position, column = position - begin;
        prefetch(p->keys, position + AHEAD, LANES, p->end, s.head_dim, type);
        uint32_t *columns = out + (int64_t)column / COLUMNS * s.depth * COLUMNS + column % COLUMNS;
        for (int at = 0; at < s.depth; at += LANES, columns += LANES * COLUMNS) {
            int left = s.depth - at;
            vec x[LANES];
            if (left >= LANES && num_keys >= LANES) /* the common case, without a branch per key */
                for (int i = 0; i < LANES; i++) x[i] = load_words(keys[i], at, LANES, s.paired, type);
            else
                for (int i = 0; i < LANES; i++)
                    x[i] = i < num_keys ? load_words(keys[i], at, left, s.paired, type) : (vec){0};
            transpose(x);
            if (left >= LANES)
                for (int i = 0; i < LANES; i++) memcpy(columns + i * COLUMNS, &x[i], sizeof(vec));
            else
                for (int i = 0; i < left; i++) memcpy(columns + i * COLUMNS, &x[i], sizeof(vec));
        }
    }
}

/* Interleave two bfloat16 values into pairs, from dimension `at` on; `odd` may be NULL for zeros. */
INLINE void pair_values(const void *even, const void *odd, int at, int left, uint32_t *out, int num_out) {
    vec a = load(element_at(even, at, BFLOAT16), 0, left / 2, FLOAT32), b = {0};
    if (odd) b = load(element_at(odd, at, BFLOAT16), 0, left / 2, FLOAT32);
    pairs low = ZIP_LOW_HALVES((pairs)a, (pairs)b), high = ZIP_HIGH_HALVES((pairs)a, (pairs)b);
    memcpy(out + at, &low, sizeof low);
    if (num_out > LANES) memcpy(out + at + LANES, &high, sizeof high);
}

INLINE void pack_values(const struct shape s, const struct positions *p, int begin, int end, uint32_t *out,
                        enum element type) {
    int step = s.paired ? 2 : 1;
    for (int position = begin; position < end; position += step, out += s.width) {
        const void *even = p->values[position % (2 * TILE)];
        const void *odd = position + 1 < end ? p->values[(position + 1) % (2 * TILE)] : NULL;
        prefetch(p->values, position + AHEAD, step, p->end, s.head_dim, type);
        int at = 0;
        if (!s.paired) {
            for (; at < s.head_dim; at += LANES) {
                vec x = load(even, at, s.head_dim - at, type);
                memcpy(out + at, &x, sizeof x);
            }
            continue;
        }
        if (odd)
            for (; at + 2 * LANES <= s.head_dim; at += 2 * LANES) pair_values(even, odd, at, 2 * LANES, out, 2 * LANES);
        for (; at < s.head_dim; at += 2 * LANES) pair_values(even, odd, at, s.head_dim - at, out, s.width - at);
    }
}
