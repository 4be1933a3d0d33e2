/* Kernels that process each token independently: norms, gated activations, and the rotary embedding, which also writes
 * the KV cache. They use the vector operations of cpu_vector.h and are compiled once per level. One thread computes a
 * token's result in a fixed order, so it does not depend on the batch or on the number of threads. */

/* Return 1 / rms of a head or a hidden state. */
INLINE float inverse_rms(const void *x, int64_t width, float eps, enum element type) {
    vec sum[2] = {{0}, {0}}; /* two chains hide the latency of the addition */
    for (int64_t i = 0; i < width; i += 2 * LANES) {
        vec a = load(x, i, width - i, type);
        sum[0] = multiply_add(a, a, sum[0]);
        if (i + LANES >= width) break;
        vec b = load(x, i + LANES, width - i - LANES, type);
        sum[1] = multiply_add(b, b, sum[1]);
    }
    return 1.0f / __builtin_sqrtf(sum_lanes(sum[0] + sum[1]) / (float)width + eps);
}

INLINE void norm_rows(const struct penstock_norm *n, int64_t first, int64_t end, enum element type) {
    for (int64_t row = first; row < end; row++) {
        const void *x = element_at(n->x, row * n->x_stride, type);
        void *y = (void *)element_at(n->y, row * n->width, type);
        if (n->residual) {
            const void *residual = element_at(n->residual, row * n->residual_stride, type);
            void *total = (void *)element_at(n->total, row * n->width, type);
            for (int64_t i = 0; i < n->width; i += LANES) {
                int64_t left = n->width - i;
                store(total, i, left, load(x, i, left, type) + load(residual, i, left, type), type);
            }
            x = total;
        }
        vec scale = splat(inverse_rms(x, n->width, n->eps, type));
        for (int64_t i = 0; i < n->width; i += LANES) {
            int64_t left = n->width - i;
            store(y, i, left, load(x, i, left, type) * scale * load(n->weight, i, left, FLOAT32), type);
        }
    }
}

/* sigmoid(x), x * sigmoid(x), or the tanh form of gelu, which is x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)). */
INLINE vec activate(vec x, enum activation kind) {
    const float log2_e = 1.44269504f;
    vec inner = x;
    if (kind == GELU_TANH) inner = splat(1.59576912f) * multiply_add(x * x * x, splat(0.044715f), x);
    /* 2^126 is as good as infinity: x times its inverse is still 0 in bfloat16 and below 1e-36 in float32 */
    vec power = inner * splat(-log2_e);
    power = choose(power < splat(126.0f), power, splat(126.0f));
    return (kind == SIGMOID ? splat(1.0f) : x) / (splat(1.0f) + power_of_two(power));
}

/* activation(gate) * up. CLAMPED_SWISH is that of gpt-oss: it clamps both, scales the sigmoid's input, adds 1 to up. */
INLINE vec gated(vec gate, vec up, enum activation kind) {
    if (kind != CLAMPED_SWISH) return activate(gate, kind) * up;
    const vec limit = splat(7.0f), slope = splat(1.702f);
    gate = choose(gate > limit, limit, gate);
    up = choose(up > limit, limit, choose(up < -limit, -limit, up));
    return activate(gate * slope, SILU) / slope * (up + splat(1.0f));
}

INLINE void gate_rows(const struct penstock_gate *g, int64_t first, int64_t end, enum activation kind, enum element type) {
    for (int64_t row = first; row < end; row++) {
        const void *gate = element_at(g->gate, row * g->gate_stride, type);
        const void *up = element_at(g->up, row * g->up_stride, type);
        for (int64_t i = 0; i < g->width; i += LANES) {
            int64_t left = g->width - i;
            vec y = gated(load(gate, i, left, type), load(up, i, left, type), kind);
            store(g->out, row * g->width + i, left, y, type);
        }
    }
}

/* Norm one head if there is a weight, rotate the pairs (i, i + half) and copy the remaining dimensions. */
INLINE void rotate_head(const struct penstock_rope *r, const void *x, const float *weight, const float *cos, const float *sin,
                        void *y, enum element type) {
    vec scale = splat(weight ? inverse_rms(x, r->head_dim, r->eps, type) : 1.0f);
    for (int i = 0; i < r->half; i += LANES) {
        int left = r->half - i, j = i + r->half;
        vec a = load(x, i, left, type), b = load(x, j, left, type);
        if (weight) {
            a = rounded(a * scale * load(weight, i, left, FLOAT32), type);
            b = rounded(b * scale * load(weight, j, left, FLOAT32), type);
        }
        vec c = load(cos, i, left, FLOAT32), s = load(sin, i, left, FLOAT32);
        store(y, i, left, a * c - b * s, type);
        store(y, j, left, b * c + a * s, type);
    }
    for (int i = 2 * r->half; i < r->head_dim; i += LANES) {
        int left = r->head_dim - i;
        vec a = load(x, i, left, type);
        if (weight) a = a * scale * load(weight, i, left, FLOAT32);
        store(y, i, left, a, type);
    }
}

INLINE void rope_rows(const struct penstock_rope *r, int64_t first, int64_t end, enum element type) {
    for (int64_t token = first; token < end; token++) {
        const float *cos = r->cos + (int64_t)r->positions[token] * r->half;
        const float *sin = r->sin + (int64_t)r->positions[token] * r->half;
        const void *q = element_at(r->q, token * r->q_stride, type);
        void *q_out = (void *)element_at(r->q_out, token * r->q_heads * r->head_dim, type);
        for (int head = 0; head < r->q_heads; head++) {
            int64_t at = (int64_t)head * r->head_dim;
            rotate_head(r, element_at(q, at, type), r->q_weight, cos, sin, (void *)element_at(q_out, at, type), type);
        }
        int64_t slot = r->kv_slots[token];
        int64_t to = slot / r->page_size * r->page_stride + slot % r->page_size * r->slot_stride;
        const void *k = element_at(r->k, token * r->k_stride, type);
        void *k_out = (void *)element_at(r->k_pages, to, type);
        for (int head = 0; head < r->kv_heads; head++) {
            int64_t at = (int64_t)head * r->head_dim;
            rotate_head(r, element_at(k, at, type), r->k_weight, cos, sin, (void *)element_at(k_out, at, type), type);
        }
        int64_t row_bytes = (int64_t)r->kv_heads * r->head_dim * (type == BFLOAT16 ? 2 : 4);
        if (!r->v) continue;
        memcpy((void *)element_at(r->v_pages, to, type), element_at(r->v, token * r->v_stride, type), row_bytes);
    }
}

IN_BOTH_TYPES(norm, norm_rows, RANGE_PARAMETERS, op, first, end)
IN_BOTH_TYPES(rope, rope_rows, RANGE_PARAMETERS, op, first, end)
IN_BOTH_TYPES(silu, gate_rows, RANGE_PARAMETERS, op, first, end, SILU)
IN_BOTH_TYPES(gelu, gate_rows, RANGE_PARAMETERS, op, first, end, GELU_TANH)
IN_BOTH_TYPES(clamped, gate_rows, RANGE_PARAMETERS, op, first, end, CLAMPED_SWISH)
IN_BOTH_TYPES(sigmoid, gate_rows, RANGE_PARAMETERS, op, first, end, SIGMOID)
