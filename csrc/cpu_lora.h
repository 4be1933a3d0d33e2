/* LoRA: y += (x down) up for rows with the same adapter, compiled once per level. Weights are [depth, width], padded to
 * whole vectors of any level, in float32 or bfloat16 independent of the rows' type. The order of every sum is
 * independent of the other rows. */

#define PASS_ROWS LORA_ROWS /* rows that share a pass over the weights */
#define MAX_COLUMNS 64 /* largest number of columns computed together */

INLINE void skinny_step(int rows, int vectors, vec sum[PASS_ROWS][4], const void *a, int64_t a_stride,
                        enum element a_type, const void *b, int64_t at, enum element b_type, int64_t k) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        vec column = load(b, at + v * LANES, LANES, b_type);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sum[r][v] = multiply_add(splat(load_scalar(a, r * a_stride + k, a_type)), column, sum[r][v]);
    }
}

/* c [rows, vectors * LANES] = a [rows, depth] b. Adjacent depths are added to `chains` independent sums to hide the
 * latency of the additions. */
INLINE void skinny_block(int rows, int vectors, int chains, const void *a, int64_t a_stride, enum element a_type,
                         const void *b, int64_t at, int64_t b_stride, enum element b_type, int64_t depth, float *c) {
    vec sum[4][PASS_ROWS][4];
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
            skinny_step(rows, vectors, sum[i], a, a_stride, a_type, b, at + (k + i) * b_stride, b_type, k + i);
    for (; k < depth; k++) skinny_step(rows, vectors, sum[0], a, a_stride, a_type, b, at + k * b_stride, b_type, k);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec all = sum[0][r][v];
#pragma GCC unroll 4
            for (int i = 1; i < chains; i++) all += sum[i][r][v];
            memcpy(c + r * MAX_COLUMNS + v * LANES, &all, sizeof all);
        }
}

/* c [rows, MAX_COLUMNS] = a [rows, depth] b for the next columns of b from `at` on; return the number of columns. */
INLINE int skinny_gemm(int rows, const void *a, int64_t a_stride, enum element a_type, const void *b, int64_t at,
                       int64_t b_stride, enum element b_type, int64_t depth, float *c) {
#define CASE(n, vectors, chains) \
    case n: skinny_block(n, vectors, chains, a, a_stride, a_type, b, at, b_stride, b_type, depth, c); break
    if (at + 4 * LANES <= b_stride) {
        switch (rows) { CASE(1, 4, 1); CASE(2, 4, 1); CASE(3, 4, 1); CASE(4, 4, 1); }
        return 4 * LANES;
    }
    switch (rows) { CASE(1, 1, 4); CASE(2, 1, 4); CASE(3, 1, 4); CASE(4, 1, 4); }
    return LANES;
#undef CASE
}

#define GEMM_OF_TYPES(name, a_type, b_type)                                                                         \
    static __attribute__((noinline)) int name(int rows, const void *a, int64_t a_stride, const void *b, int64_t at, \
                                              int64_t b_stride, int64_t depth, float *c) {                          \
        return skinny_gemm(rows, a, a_stride, a_type, b, at, b_stride, b_type, depth, c);                           \
    }
GEMM_OF_TYPES(gemm_f32_f32, FLOAT32, FLOAT32)
GEMM_OF_TYPES(gemm_f32_bf16, FLOAT32, BFLOAT16)
GEMM_OF_TYPES(gemm_bf16_bf16, BFLOAT16, BFLOAT16)
GEMM_OF_TYPES(gemm_bf16_f32, BFLOAT16, FLOAT32)

INLINE void lora_rows(const struct penstock_adapt *l, const struct penstock_adapter *a, int64_t first, int64_t end,
                      enum element type) {
    int is_bfloat16 = a->is_bfloat16, stride = (int)a->down_stride;
    int (*down)(int, const void *, int64_t, const void *, int64_t, int64_t, int64_t, float *) =
        type == BFLOAT16 ? (is_bfloat16 ? gemm_bf16_bf16 : gemm_bf16_f32) : is_bfloat16 ? gemm_f32_bf16 : gemm_f32_f32;
    int (*up)(int, const void *, int64_t, const void *, int64_t, int64_t, int64_t, float *) =
        is_bfloat16 ? gemm_f32_bf16 : gemm_f32_f32;
    float inner[PASS_ROWS * MAX_DOWN_STRIDE], c[PASS_ROWS * MAX_COLUMNS];
    for (int64_t row = first; row < end; row += PASS_ROWS) {
        int rows = end - row < PASS_ROWS ? (int)(end - row) : PASS_ROWS, done;
        for (int at = 0; at < stride; at += done) {
            done = down(rows, element_at(l->x, row * l->x_stride, type), l->x_stride, a->down, at, stride,
                        l->depth, c);
            for (int r = 0; r < rows; r++) memcpy(inner + r * stride + at, c + r * MAX_COLUMNS, (size_t)done * 4);
        }
        for (int i = 0; i < a->num_parts; i++) {
            const struct penstock_adapter_part *p = &a->parts[i];
            void *y = (void *)element_at(l->y, row * l->y_stride + p->column, type);
            for (int64_t at = 0; at < p->width; at += done) {
                done = up(rows, inner + p->first, stride, p->up, at, p->up_stride, p->rank, c);
                for (int r = 0; r < rows; r++)
                    for (int64_t j = 0; j < done && at + j < p->width; j += LANES) {
                        int64_t to = r * l->y_stride + at + j, left = p->width - at - j;
                        vec sum = load(c, r * MAX_COLUMNS + j, LANES, FLOAT32);
                        store(y, to, left, load(y, to, left, type) + sum, type);
                    }
            }
        }
    }
}

/* Compute items [first, end). An item is LORA_ROWS rows of one run. */
INLINE void lora_items(const struct penstock_adapt *l, int64_t first, int64_t end, enum element type) {
    int64_t before = 0;
    for (int i = 0; i < l->num_runs && before < end; i++) {
        const struct penstock_run *run = &l->runs[i];
        int64_t items = (run->count + LORA_ROWS - 1) / LORA_ROWS;
        int64_t from = first > before ? first - before : 0, to = end - before < items ? end - before : items;
        before += items;
        if (from >= to) continue;
        int64_t last = to * LORA_ROWS < run->count ? to * LORA_ROWS : run->count;
        lora_rows(l, run->adapters + l->product, run->first + from * LORA_ROWS, run->first + last, type);
    }
}

IN_BOTH_TYPES(lora, lora_items, RANGE_PARAMETERS, op, first, end)
