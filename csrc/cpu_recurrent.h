/* Recurrent layers: the short convolution, the gated delta rule and Mamba 2, as cpu_ops.cdef.h describes them.
 *
 * A row's tokens are processed one after the other, so chunks of any size give the same bits. This is also fast: a
 * block of a head's state stays in the cache for RUN tokens, and each pass over it applies one token and multiplies the
 * state by the next token's key and query. */

INLINE void *unit_of(const struct penstock_states *s, int32s table, int row, int unit) {
    int at = s->first_unit + unit;
    int64_t page = table[(int64_t)row * s->pages + at / s->units_per_page];
    return (char *)s->base + page * s->page_bytes + at % s->units_per_page * s->unit_bytes;
}

/* Return the inputs of token `at`, counted from the row's first token in this step; earlier ones are in `tail`. */
INLINE const void *inputs_at(const struct penstock_convolution *c, const void *tail, int64_t first, int64_t at,
                             enum element type) {
    return at < 0 ? element_at(tail, (at + c->taps - 1) * c->channels, type)
                  : element_at(c->x, (first + at) * c->x_stride, type);
}

INLINE void convolve_block(const struct penstock_convolution *c, int row, int64_t channel, int64_t end, enum element type) {
    int32s starts = c->states->query_starts;
    int64_t first = starts[row], count = starts[row + 1] - first, size = type == BFLOAT16 ? 2 : 4;
    if (!count) return;
    const void *tail = unit_of(c->states, c->states->read, row, 0);
    char *kept = unit_of(c->states, c->states->write, row, 0);
    int before = c->taps - 1;
    if (c->states->is_new[row]) {
        for (int j = 0; j < before; j++) memset(kept + (j * c->channels + channel) * size, 0, (end - channel) * size);
        tail = kept;
    }
    for (int64_t token = 0; token < count; token++) {
        void *y = (void *)element_at(c->y, (first + token) * c->channels, type);
        for (int64_t i = channel; i < end; i += LANES) {
            int64_t left = end - i;
            vec sum = c->bias ? load(c->bias, i, left, FLOAT32) : (vec){0};
            for (int j = 0; j < c->taps; j++)
                sum = multiply_add(load(inputs_at(c, tail, first, token - before + j, type), i, left, type),
                                   load(c->weight, j * c->channels + i, left, FLOAT32), sum);
            store(y, i, left, c->has_silu ? activate(sum, SILU) : sum, type);
        }
    }
    for (int j = 0; j < before; j++) /* ascending, because after few tokens the rest of the tail moves down */
        memmove(kept + (j * c->channels + channel) * size,
                element_at(inputs_at(c, tail, first, count - before + j, type), channel, type),
                (end - channel) * size);
}

/* The inputs of up to RUN tokens of one head. */
struct delta_run {
    float q[RUN][PENSTOCK_HEAD], k[RUN][PENSTOCK_HEAD], out[RUN][PENSTOCK_HEAD];
    float decay[RUN], beta[RUN], product[RUN]; /* product: q · k */
    float skip;
};

/* Store x / |x| * scale; x unchanged if scale is 0. */
INLINE void direction(const void *x, int64_t width, float scale, float *y, enum element type) {
    vec sum = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec a = load(x, i, width - i, type);
        sum = multiply_add(a, a, sum);
    }
    vec factor = splat(scale ? scale / __builtin_sqrtf(sum_lanes(sum) + 1e-6f) : 1.0f);
    for (int64_t i = 0; i < width; i += LANES) store(y, i, width - i, load(x, i, width - i, type) * factor, FLOAT32);
}

INLINE void begin_run(const struct penstock_delta *d, struct delta_run *run, int head, int64_t first, int count,
                      enum element type) {
    int key = head / (d->value_heads / d->key_heads), width = d->key_dim;
    float scale = d->skip ? 0.0f : 1.0f / __builtin_sqrtf((float)width);
    run->skip = d->skip ? d->skip[head] : 0.0f;
    for (int t = 0; t < count; t++) {
        int64_t token = first + t;
        const void *q = element_at(d->qkv, token * d->qkv_stride + key * width, type);
        direction(q, width, scale, run->q[t], type);
        direction(element_at(q, (int64_t)d->key_heads * width, type), width, !d->skip, run->k[t], type);
        vec sum = {0};
        for (int64_t i = 0; i < width; i += LANES)
            sum = multiply_add(load(run->q[t], i, width - i, FLOAT32), load(run->k[t], i, width - i, FLOAT32), sum);
        run->product[t] = sum_lanes(sum);
        int64_t gate = token * d->gates_stride + head;
        float a = load_scalar(d->gates, d->skip ? gate : gate + d->value_heads, type) + d->shift[head];
        float softplus = a > 20.0f ? a : log1pf(expf(a));
        run->decay[t] = expf(d->rate[head] * softplus);
        run->beta[t] = d->skip ? softplus : 1.0f / (1.0f + expf(-load_scalar(d->gates, gate, type)));
    }
}

/* Apply the tokens of a run to columns [column, column + vecs * LANES) of the state, of which `left` exist. */
INLINE void delta_columns(const struct penstock_delta *d, struct delta_run *run, const void *v, float *state,
                          int64_t column, int64_t left, int count, const int vecs, const int erases,
                          enum element type) {
    vec with_key[2] = {{0}, {0}}, with_query[2] = {{0}, {0}}; /* the state's products with the next token's k and q */
    for (int i = 0; i < d->key_dim; i++)
        for (int n = 0; n < vecs; n++) {
            vec s = load(state, i * (int64_t)d->value_dim + column + n * LANES, left - n * LANES, FLOAT32);
            if (erases) with_key[n] = multiply_add(splat(run->k[0][i]), s, with_key[n]);
            with_query[n] = multiply_add(splat(run->q[0][i]), s, with_query[n]);
        }
    for (int t = 0; t < count; t++) {
        int next = t + 1 < count ? t + 1 : t;
        const float *k = run->k[t], *next_k = run->k[next], *next_q = run->q[next];
        vec decay = splat(run->decay[t]), change[2];
        for (int n = 0; n < vecs; n++) {
            int64_t at = column + n * LANES;
            vec value = load(v, t * d->qkv_stride + at, left - n * LANES, type);
            change[n] = splat(run->beta[t]) * (value - decay * with_key[n]);
            vec out = multiply_add(splat(run->product[t]), change[n], decay * with_query[n]);
            if (!erases) out = multiply_add(splat(run->skip), value, out);
            store(run->out[t], at, left - n * LANES, out, FLOAT32);
            with_key[n] = with_query[n] = (vec){0};
        }
        for (int i = 0; i < d->key_dim; i++)
            for (int n = 0; n < vecs; n++) {
                int64_t at = i * (int64_t)d->value_dim + column + n * LANES;
                vec s = load(state, at, left - n * LANES, FLOAT32) * decay;
                s = multiply_add(splat(k[i]), change[n], s);
                store(state, at, left - n * LANES, s, FLOAT32);
                if (erases) with_key[n] = multiply_add(splat(next_k[i]), s, with_key[n]);
                with_query[n] = multiply_add(splat(next_q[i]), s, with_query[n]);
            }
    }
}

INLINE void end_run(const struct penstock_delta *d, const struct delta_run *run, int head, int64_t first, int count,
                    enum element type) {
    int64_t width = d->value_dim;
    for (int t = 0; t < count; t++) {
        const void *z = element_at(d->z, (first + t) * d->z_stride + head * width, type);
        void *out = (void *)element_at(d->out, ((first + t) * d->value_heads + head) * width, type);
        vec scale = splat(d->skip ? 1.0f : inverse_rms(run->out[t], width, d->eps, FLOAT32));
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t left = width - i;
            vec y = load(run->out[t], i, left, FLOAT32) * scale;
            if (!d->skip) y *= load(d->norm_weight, i, left, FLOAT32);
            store(out, i, left, y * activate(load(z, i, left, type), SILU), type);
        }
    }
}

/* Process one head of one row. */
INLINE void delta_head(const struct penstock_delta *d, int row, int head, enum element type) {
    const struct penstock_states *s = d->states;
    int32s starts = s->query_starts;
    float *state = unit_of(s, s->write, row, 1 + head);
    const float *before = unit_of(s, s->read, row, 1 + head);
    size_t size = (size_t)d->key_dim * d->value_dim * sizeof *state;
    if (starts[row] == starts[row + 1]) return;
    if (s->is_new[row]) memset(state, 0, size);
    else if (before != state) memcpy(state, before, size);
    struct delta_run run;
    for (int64_t first = starts[row]; first < starts[row + 1]; first += RUN) {
        int count = starts[row + 1] - first < RUN ? (int)(starts[row + 1] - first) : RUN;
        begin_run(d, &run, head, first, count, type);
        int64_t values = first * d->qkv_stride + 2 * (int64_t)d->key_heads * d->key_dim + (int64_t)head * d->value_dim;
        const void *v = element_at(d->qkv, values, type);
        int64_t column = 0;
        for (; column + 2 * LANES <= d->value_dim; column += 2 * LANES)
            if (d->skip) delta_columns(d, &run, v, state, column, 2 * LANES, count, 2, 0, type);
            else delta_columns(d, &run, v, state, column, 2 * LANES, count, 2, 1, type);
        for (; column < d->value_dim; column += LANES)
            delta_columns(d, &run, v, state, column, d->value_dim - column, count, 1, !d->skip, type);
        end_run(d, &run, head, first, count, type);
    }
}

/* Process items [first, end): item i is row i / blocks and block i % blocks of its channels, or head i % heads. */
INLINE void convolve_items(const struct penstock_convolution *c, int64_t first, int64_t end, enum element type) {
    int64_t blocks = (c->channels + CHANNELS - 1) / CHANNELS;
    for (int64_t i = first; i < end; i++) {
        int64_t channel = i % blocks * CHANNELS, last = channel + CHANNELS;
        convolve_block(c, (int)(i / blocks), channel, last < c->channels ? last : c->channels, type);
    }
}

INLINE void delta_items(const struct penstock_delta *d, int64_t first, int64_t end, enum element type) {
    for (int64_t i = first; i < end; i++) delta_head(d, (int)(i / d->value_heads), (int)(i % d->value_heads), type);
}

IN_BOTH_TYPES(convolve, convolve_items, RANGE_PARAMETERS, op, first, end)
IN_BOTH_TYPES(delta, delta_items, RANGE_PARAMETERS, op, first, end)
