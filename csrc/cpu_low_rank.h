/* LoRA: y += (x down) up for rows with the same adapter, compiled once per level.
 *
 * Weights are [depth, width], padded to whole vectors of any level, in float32 or bfloat16 independent of the rows'
 * type. The order of every sum is independent of the other rows. */

#define FEW 4   /* rows that share a pass over the weights */
#define WIDE 64 /* largest number of columns computed together */

INLINE void thin_step(int rows, int vectors, vec sum[FEW][4], const void *a, int64_t a_stride, enum element a_type,
                      const void *b, int64_t at, enum element b_type, int64_t k) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        vec column = load(b, at + v * LANES, LANES, b_type);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sum[r][v] = multiply_add(splat(one_of((uintptr_t)a, r * a_stride + k, a_type)), column, sum[r][v]);
    }
}

/* c [rows, vectors * LANES] = a [rows, depth] b. Adjacent depths go to `chains` independent sums, which hides the
 * latency of the additions. */
INLINE void thin_block(int rows, int vectors, int chains, const void *a, int64_t a_stride, enum element a_type,
                       const void *b, int64_t at, int64_t b_stride, enum element b_type, int64_t depth, float *c) {
    vec sum[4][FEW][4];
#pragma GCC unroll 4
    for (int i = 0; i < chains; i++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[i][r][v] = (vec){0};
    int64_t k = 0;
    for (; k + chains <= depth; k += chains)
#pragma GCC unroll 4
        for (int i = 0; i < chains; i++)
            thin_step(rows, vectors, sum[i], a, a_stride, a_type, b, at + (k + i) * b_stride, b_type, k + i);
    for (; k < depth; k++) thin_step(rows, vectors, sum[0], a, a_stride, a_type, b, at + k * b_stride, b_type, k);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec all = sum[0][r][v];
#pragma GCC unroll 4
            for (int i = 1; i < chains; i++) all += sum[i][r][v];
            memcpy(c + r * WIDE + v * LANES, &all, sizeof all);
        }
}

/* c [rows, WIDE] = a [rows, depth] b for the next columns of b from `at` on; returns the number of these columns. */
INLINE int thin(int rows, const void *a, int64_t a_stride, enum element a_type, const void *b, int64_t at,
                int64_t b_stride, enum element b_type, int64_t depth, float *c) {
#define THIN(n, vectors, chains) \
    case n: thin_block(n, vectors, chains, a, a_stride, a_type, b, at, b_stride, b_type, depth, c); break
    if (at + 4 * LANES <= b_stride) {
        switch (rows) { THIN(1, 4, 1); THIN(2, 4, 1); THIN(3, 4, 1); THIN(4, 4, 1); }
        return 4 * LANES;
    }
    switch (rows) { THIN(1, 1, 4); THIN(2, 1, 4); THIN(3, 1, 4); THIN(4, 1, 4); }
    return LANES;
#undef THIN
}

#define THIN_OF(name, a_type, b_type)                                                                                 \
    static __attribute__((noinline)) int name(int rows, const void *a, int64_t a_stride, const void *b, int64_t at,   \
                                              int64_t b_stride, int64_t depth, float *c) {                            \
        return thin(rows, a, a_stride, a_type, b, at, b_stride, b_type, depth, c);                                    \
    }
THIN_OF(thin_float32, FLOAT32, FLOAT32)
THIN_OF(thin_narrow, FLOAT32, BFLOAT16)
THIN_OF(thin_bfloat16, BFLOAT16, BFLOAT16)
THIN_OF(thin_wide, BFLOAT16, FLOAT32)

INLINE void low_rank_rows(const struct low_rank *l, int64_t first, int64_t end, enum element type) {
    const struct penstock_adapter *a = l->adapter;
    int is_narrow = a->is_bfloat16, stride = (int)a->down_stride;
    int (*down)(int, const void *, int64_t, const void *, int64_t, int64_t, int64_t, float *) =
        type == BFLOAT16 ? (is_narrow ? thin_bfloat16 : thin_wide) : is_narrow ? thin_narrow : thin_float32;
    int (*up)(int, const void *, int64_t, const void *, int64_t, int64_t, int64_t, float *) =
        is_narrow ? thin_narrow : thin_float32;
    float inner[FEW * MOST_RANKS], c[FEW * WIDE];
    for (int64_t row = first; row < end; row += FEW) {
        int rows = end - row < FEW ? (int)(end - row) : FEW, done;
        for (int at = 0; at < stride; at += done) {
            done = down(rows, element_at(l->x, row * l->x_stride, type), l->x_stride, (const void *)a->down, at, stride,
                        l->depth, c);
            for (int r = 0; r < rows; r++) memcpy(inner + r * stride + at, c + r * WIDE, (size_t)done * 4);
        }
        for (int i = 0; i < a->num_parts; i++) {
            const struct penstock_adapter_part *p = &a->parts[i];
            void *y = (void *)element_at(l->y, row * l->y_stride + p->column, type);
            for (int64_t at = 0; at < p->width; at += done) {
                done = up(rows, inner + p->first, stride, (const void *)p->up, at, p->up_stride, p->rank, c);
                for (int r = 0; r < rows; r++)
                    for (int64_t j = 0; j < done && at + j < p->width; j += LANES) {
                        int64_t to = r * l->y_stride + at + j, left = p->width - at - j;
                        store(y, to, left, load(y, to, left, type) + load(c, r * WIDE + j, LANES, FLOAT32), type);
                    }
            }
        }
    }
}

IN_BOTH_TYPES(low_rank, low_rank_rows, (const struct low_rank *l, int64_t first, int64_t end), l, first, end)
