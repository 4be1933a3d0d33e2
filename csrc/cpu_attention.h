/* Attention of a few queries of one sequence over the pages of one KV head, compiled once per level.
 *
 * A job's rows are its queries times the heads of a GQA group: every key and value is loaded and repacked once for all
 * of them. Positions are processed in tiles [n TILE, (n + 1) TILE). For each row, a tile yields the largest score, the
 * sum of the softmax weights relative to it and the weighted sum of the values; tiles are then merged in ascending
 * order.
 *
 * This fixed order makes a query's result bitwise independent of the rest of the batch and of prefill chunking: the
 * tiles, the order inside a tile and the order of merging depend on positions alone. Masked positions have a weight of
 * exactly 0, so a tile may extend beyond the positions that a row attends to, and a completely masked tile changes
 * nothing. If a row is split over threads, each tile's result is stored and merged later by the same code. */

#define MINUS_INFINITY (-__builtin_inff())
#define LOG2_E 1.44269504f

/* The scratch memory of a job; one per thread. */
struct workspace {
    uint32_t *q;             /* [rows, depth] words */
    uint32_t *keys;          /* [TILE / COLUMNS, depth, COLUMNS] words: a key is a column */
    uint32_t *values;        /* [TILE or TILE / 2, width] words */
    float *scores;           /* [ROWS, TILE]; then the weights, [ROWS, TILE] with half a row unused if paired */
    float *products;         /* [ROWS, width] */
    float *sums;             /* [rows, width]: weighted values of the tiles merged so far */
    float *largest, *weight; /* [rows]: largest score (base 2) and sum of weights of these tiles */
};

/* Divide `memory` into the parts and return the bytes needed; sizes are those of float32, the larger type. */
static int64_t lay_out(struct workspace *w, char *memory, int head_dim, int rows) {
    int64_t width = (head_dim + LANES - 1) / LANES * LANES, used = 0;
    struct {
        void **part;
        int64_t words;
    } parts[] = {{(void **)&w->q, rows * (int64_t)head_dim}, {(void **)&w->keys, TILE * (int64_t)head_dim},
                 {(void **)&w->values, TILE * width},         {(void **)&w->scores, ROWS * TILE},
                 {(void **)&w->products, ROWS * width},       {(void **)&w->sums, rows * width},
                 {(void **)&w->largest, rows},                {(void **)&w->weight, rows}};
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (memory) *parts[i].part = memory + used;
        used += (4 * parts[i].words + 63) / 64 * 64;
    }
    return used;
}

static int64_t scratch_bytes(int head_dim, int rows) {
    struct workspace unused;
    return lay_out(&unused, NULL, head_dim, rows);
}

/* The factor from a capped score, or from a product of query and key, to an exponent of two. */
INLINE float scale_log2(const struct penstock_attention *a) { return (a->cap ? a->cap : a->scale) * LOG2_E; }

/* Replace the scores [count] of one row by softmax weights, 0 outside [first, end); return their sum. */
INLINE float softmax_tile(const struct penstock_attention *a, float *scores, int first, int end, int count, int paired,
                          float *largest) {
    const ivec lane = LANE_INDEX;
    vec top = splat(MINUS_INFINITY), sum = {0};
    for (int i = 0; i < count; i += LANES) {
        vec x;
        memcpy(&x, scores + i, sizeof x);
        if (a->cap) { /* logit soft-capping: tanh(score / cap), from 2^(score * squeeze) = e^(2 score / cap) */
            const float squeeze = 2.0f * a->scale / a->cap * LOG2_E;
            vec power = x * splat(squeeze);
            power = choose(power < splat(126.0f), power, splat(126.0f));
            x = splat(1.0f) - splat(2.0f) / (splat(1.0f) + power_of_two(power));
            memcpy(scores + i, &x, sizeof x);
        }
        if (i < first || i + LANES > end) {
            ivec position = lane + i;
            x = choose((position >= first) & (position < end), x, splat(MINUS_INFINITY));
            memcpy(scores + i, &x, sizeof x);
        }
        top = larger(top, x);
    }
    *largest = largest_lane(top) * scale_log2(a);
    vec base = splat(*largest == MINUS_INFINITY ? 0.0f : -*largest), scale = splat(scale_log2(a));
    for (int i = 0; i < count; i += LANES) {
        vec x;
        memcpy(&x, scores + i, sizeof x);
        x = power_of_two(multiply_add(x, scale, base));
        sum += x;
        store(scores, i, LANES, x, paired ? BFLOAT16 : FLOAT32); /* pairs overwrite only scores already read */
    }
    return sum_lanes(sum);
}

/* Merge one tile's result into that of `rows` rows, rescaling both to the larger of their maxima. */
INLINE void merge_tile(const struct workspace *w, int first_row, int rows, int width, const float *largest,
                 const float *weight, const float *products) {
    float kept[ROWS + LANES], added[ROWS + LANES];
    for (int i = 0; i < rows; i += LANES) {
        int64_t at = first_row + i, left = rows - i;
        vec old = load(w->largest, at, left, FLOAT32), new = load(largest, i, left, FLOAT32);
        vec both = larger(old, new), base = choose(both == splat(MINUS_INFINITY), splat(0.0f), both);
        vec keep = power_of_two(old - base), add = power_of_two(new - base);
        store(w->largest, at, left, both, FLOAT32);
        vec sum = load(w->weight, at, left, FLOAT32) * keep;
        store(w->weight, at, left, multiply_add(load(weight, i, left, FLOAT32), add, sum), FLOAT32);
        memcpy(kept + i, &keep, sizeof keep);
        memcpy(added + i, &add, sizeof add);
    }
    for (int r = 0; r < rows; r++) {
        float *sums = w->sums + (int64_t)(first_row + r) * width;
        vec keep = splat(kept[r]), add = splat(added[r]);
        for (int i = 0; i < width; i += LANES) {
            vec product, sum;
            memcpy(&product, products + (int64_t)r * width + i, sizeof product);
            memcpy(&sum, sums + i, sizeof sum);
            sum = multiply_add(product, add, sum * keep);
            memcpy(sums + i, &sum, sizeof sum);
        }
    }
}

/* Zero the first `count` values of the tile. They are before every query's window, so their pages may have been reused
 * and contain NaN, which a weight of 0 would not mask. */
INLINE void zero_values(const struct shape *s, const struct workspace *w, int count) {
    int rows = s->paired ? count / 2 : count;
    memset(w->values, 0, sizeof(uint32_t) * rows * s->width);
    if (s->paired && count % 2)
        for (int i = 0; i < s->width; i++) w->values[(int64_t)rows * s->width + i] &= 0xFFFF0000u;
}

/* Compute largest [rows], weight [rows] and products [rows, width] of the tile at `begin` for the job's rows from
 * first_row on; rows of one query are adjacent. `first_position` is the position of the job's first query. */
INLINE void attend_tile(const struct penstock_attention *a, const struct shape *s, const struct workspace *w, int first_row,
                        int rows, int first_position, int begin, float *largest, float *weight, float *products) {
    int last = first_position + (first_row + rows - 1) / s->group;
    int count = last + 1 - begin < TILE ? last + 1 - begin : TILE; /* all rows are masked beyond */
    for (int column = 0; column < count; column += COLUMNS)
        multiply_rows(rows, VECTORS, w->q + (int64_t)first_row * s->depth, s->depth,
                      w->keys + (int64_t)column * s->depth, COLUMNS, s->depth, w->scores + column, TILE, s->paired);
    for (int r = 0; r < rows; r++) {
        int position = first_position + (first_row + r) / s->group;
        int first = a->window && position >= a->window ? position + 1 - a->window - begin : 0;
        weight[r] = softmax_tile(a, w->scores + r * TILE, first, position + 1 - begin, count, s->paired, &largest[r]);
    }
    int depth = count < 0 ? 0 : s->paired ? (count + 1) / 2 : count;
    const uint32_t *weights = (const uint32_t *)w->scores;
    int at = 0;
    for (; at + COLUMNS <= s->width; at += COLUMNS)
        multiply_rows(rows, VECTORS, weights, TILE, w->values + at, s->width, depth, products + at, s->width,
                      s->paired);
    for (; at < s->width; at += LANES)
        multiply_rows(rows, 1, weights, TILE, w->values + at, s->width, depth, products + at, s->width, s->paired);
}

/* Initialize the rows: empty, or with the head's attention sink, whose weight relative to itself is 1. */
INLINE void init_rows(const struct penstock_attention *a, int kv_head, const struct shape *s, const struct workspace *w,
                      int rows) {
    for (int r = 0; r < rows; r++) {
        w->largest[r] = a->sinks ? a->sinks[kv_head * s->group + r % s->group] * LOG2_E : MINUS_INFINITY;
        w->weight[r] = a->sinks ? 1.0f : 0.0f;
    }
    memset(w->sums, 0, sizeof(float) * rows * s->width);
}

INLINE void finish_rows(const struct penstock_attention *a, const struct attention_job *job, int kv_head,
                        const struct shape *s, const struct workspace *w, enum element type) {
    int64_t token = a->query_starts[job->row] + job->first_query;
    for (int r = 0; r < job->num_queries * s->group; r++) {
        int64_t head = (token + r / s->group) * a->q_heads + (int64_t)kv_head * s->group + r % s->group;
        vec scale = splat(w->weight[r] == 0.0f ? 0.0f : 1.0f / w->weight[r]); /* 0: all positions are masked */
        for (int i = 0; i < a->head_dim; i += LANES) {
            vec x = load(w->sums, (int64_t)r * s->width + i, LANES, FLOAT32) * scale;
            store(a->out, head * a->head_dim + i, a->head_dim - i, x, type);
        }
    }
}

INLINE void load_queries(const struct penstock_attention *a, const struct attention_job *job, int kv_head,
                         const struct shape *s, uint32_t *out, enum element type) {
    int64_t token = a->query_starts[job->row] + job->first_query;
    for (int r = 0; r < job->num_queries * s->group; r++, out += s->depth) {
        int64_t head = (int64_t)kv_head * s->group + r % s->group;
        const void *q = element_at(a->q, (token + r / s->group) * a->q_stride + head * a->head_dim, type);
        for (int i = 0; i < s->depth; i += LANES)
            store(out, i, s->depth - i, load_words(q, i, s->depth - i, s->paired, type), FLOAT32);
    }
}

INLINE void attend(const struct penstock_attention *a, const struct attention_job *job, int kv_head, float *partials,
                   void *scratch, enum element type) {
    const struct shape s = shape_of(a, type);
    struct workspace w;
    int rows = job->num_queries * s.group;
    lay_out(&w, scratch, a->head_dim, rows);
    load_queries(a, job, kv_head, &s, w.q, type);
    init_rows(a, kv_head, &s, &w, rows);

    int num_queries = a->query_starts[job->row + 1] - a->query_starts[job->row];
    int first_position = a->context_lens[job->row] - num_queries + job->first_query;
    int end = first_position + job->num_queries;
    int begin = job->first_tile * TILE;
    int seen_from = a->window && first_position >= a->window ? first_position + 1 - a->window : 0;
    struct positions p;
    find_positions(a, job->row, kv_head, begin, end, &p, type);
    prefetch(p.keys, begin, AHEAD, p.end, s.head_dim, type);
    prefetch(p.values, begin, AHEAD, p.end, s.head_dim, type);
    for (int tile = 0; tile < job->num_tiles; tile++, begin += TILE) {
        int tile_end = p.end;
        if (tile + 1 < job->num_tiles) find_positions(a, job->row, kv_head, begin + TILE, end, &p, type);
        pack_keys(s, &p, begin, tile_end, w.keys, type);
        pack_values(s, &p, begin, tile_end, w.values, type);
        if (begin < seen_from) zero_values(&s, &w, seen_from - begin);
        for (int first = 0; first < rows; first += ROWS) {
            int some = rows - first < ROWS ? rows - first : ROWS;
            if (job->partial >= 0) {
                float *partial = partials + job->partial + tile * partial_floats(rows, a->head_dim);
                attend_tile(a, &s, &w, first, some, first_position, begin, partial + first, partial + rows + first,
                            partial + 2 * rows + (int64_t)first * s.width);
            } else {
                float largest[ROWS], weight[ROWS];
                attend_tile(a, &s, &w, first, some, first_position, begin, largest, weight, w.products);
                merge_tile(&w, first, some, s.width, largest, weight, w.products);
            }
        }
    }
    if (job->partial < 0) finish_rows(a, job, kv_head, &s, &w, type);
}

/* Merge the tiles of all pieces in the order in which attend() merges them. */
INLINE void combine(const struct penstock_attention *a, const struct attention_job *pieces, int kv_head, const float *partials,
                    void *scratch, enum element type) {
    const struct shape s = shape_of(a, type);
    struct workspace w;
    int rows = pieces->num_queries * s.group;
    lay_out(&w, scratch, a->head_dim, rows);
    init_rows(a, kv_head, &s, &w, rows);
    for (const struct attention_job *job = pieces; job < pieces + pieces->num_pieces; job++)
        for (int tile = 0; tile < job->num_tiles; tile++) {
            const float *partial = partials + job->partial + tile * partial_floats(rows, a->head_dim);
            for (int first = 0; first < rows; first += ROWS) {
                int some = rows - first < ROWS ? rows - first : ROWS;
                merge_tile(&w, first, some, s.width, partial + first, partial + rows + first,
                     partial + 2 * rows + (int64_t)first * s.width);
            }
        }
    finish_rows(a, pieces, kv_head, &s, &w, type);
}

IN_BOTH_TYPES(attend, attend, (const struct penstock_attention *a, const struct attention_job *job, int kv_head,
                               float *partials, void *scratch), a, job, kv_head, partials, scratch)
IN_BOTH_TYPES(combine, combine, (const struct penstock_attention *a, const struct attention_job *pieces, int kv_head,
                                 const float *partials, void *scratch), a, pieces, kv_head, partials, scratch)
