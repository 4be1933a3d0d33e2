/* The entry points of the executor's CPU kernels: they pick the instruction level and spread tokens over threads.
 *
 * How attention is cut into jobs is in cpu_plan.c; the arithmetic is in cpu_rows.h and cpu_attention.h. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_level.h"
#include "cpu_ops.cdef.h"
#include "cpu_plan.h"
#include "cpu_threads.h"

static const struct cpu_level *const levels[] = {
    &cpu_level_portable,
#if defined(__x86_64__)
    &cpu_level_avx2,
    &cpu_level_avx512,
    &cpu_level_avx512_bf16,
#endif
};

int penstock_cpu_instructions(void) {
    int found = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found |= PENSTOCK_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found |= PENSTOCK_AVX512;
    if (__builtin_cpu_supports("avx512vnni")) found |= PENSTOCK_VNNI;
    if (__builtin_cpu_supports("avx512bf16")) found |= PENSTOCK_BF16;
#endif
    return found;
}

int penstock_cpu_best_level(int instructions) {
    const int with_vnni = PENSTOCK_AVX2 | PENSTOCK_AVX512 | PENSTOCK_VNNI, with_bf16 = with_vnni | PENSTOCK_BF16;
    if ((instructions & with_bf16) == with_bf16) return 3;
    if ((instructions & with_vnni) == with_vnni) return 2;
    return instructions & PENSTOCK_AVX2 ? 1 : 0;
}

const char *penstock_cpu_level_name(int level) { return levels[level]->name; }

const struct cpu_level *level_of(const struct penstock_cpu *cpu) { return levels[cpu->level]; }

/* A fork and join costs 1 to 7 microseconds, by whether the threads wait spinning or asleep. Both limits are 20 to
 * 30 microseconds of work for one core; with a team that is there, 1 to 3. */
#define ELEMENTS_WORTH_A_THREAD (1 << 16)
#define ELEMENTS_WORTH_SHARING (1 << 12)
#define PRODUCTS_WORTH_A_FORK (2 << 20)
#define PRODUCTS_WORTH_SHARING (1 << 18)

int threads_for(int64_t cost, const struct penstock_cpu *cpu) {
    return cost < (has_session() ? PRODUCTS_WORTH_SHARING : PRODUCTS_WORTH_A_FORK) ? 1 : cpu->num_threads;
}

static int64_t chunk_of(int64_t rows, int64_t width, int num_threads) {
    int64_t elements = has_session() ? ELEMENTS_WORTH_SHARING : ELEMENTS_WORTH_A_THREAD;
    int64_t least = elements / (width + 1) + 1, even = rows / (4 * num_threads) + 1;
    return even > least ? even : least;
}

struct norm_work {
    const struct cpu_level *level;
    int type;
    struct norm norm;
};

static void norm_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct norm_work *w = work;
    w->level->norm[w->type](&w->norm, first, end);
}

void penstock_norm(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t residual,
                   int64_t residual_stride, uintptr_t weight, uintptr_t y, uintptr_t total, int64_t rows,
                   int64_t width, float eps) {
    struct norm_work w = {levels[cpu->level], cpu->is_bfloat16,
                          {.x = (const void *)x, .residual = (const void *)residual, .weight = (const float *)weight,
                           .y = (void *)y, .total = (void *)total, .x_stride = x_stride,
                           .residual_stride = residual_stride, .width = width, .eps = eps}};
    spread(norm_some, &w, rows, chunk_of(rows, width, cpu->num_threads), cpu->num_threads);
}

struct gate_work {
    const struct cpu_level *level;
    int type, activation;
    struct gate gate;
};

static void gate_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct gate_work *w = work;
    w->level->gate[w->activation][w->type](&w->gate, first, end);
}

void penstock_gate(const struct penstock_cpu *cpu, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                   int64_t up_stride, uintptr_t out, int64_t rows, int64_t width) {
    struct gate_work w = {levels[cpu->level], cpu->is_bfloat16, activation,
                          {.gate = (const void *)gate, .up = (const void *)up, .out = (void *)out,
                           .gate_stride = gate_stride, .up_stride = up_stride, .width = width}};
    spread(gate_some, &w, rows, chunk_of(rows, 2 * width, cpu->num_threads), cpu->num_threads);
}

struct rope_work {
    const struct cpu_level *level;
    int type;
    struct rope rope;
};

static void rope_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct rope_work *w = work;
    w->level->rope[w->type](&w->rope, first, end);
}

void penstock_rope(const struct penstock_cpu *cpu, int64_t tokens, uintptr_t q, int64_t q_stride, uintptr_t k,
                   int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t cos, uintptr_t sin, int half,
                   uintptr_t positions, uintptr_t kv_slots, uintptr_t q_weight, uintptr_t k_weight, float eps,
                   uintptr_t q_out, uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride,
                   int q_heads, int kv_heads, int head_dim, int page_size) {
    struct rope_work w = {
        levels[cpu->level], cpu->is_bfloat16,
        {.q = (const void *)q, .k = (const void *)k, .v = (const void *)v, .q_stride = q_stride,
         .k_stride = k_stride, .v_stride = v_stride, .cos = (const float *)cos, .sin = (const float *)sin,
         .positions = (const int32_t *)positions, .kv_slots = (const int64_t *)kv_slots,
         .q_weight = (const float *)q_weight, .k_weight = (const float *)k_weight, .q_out = (void *)q_out,
         .k_pages = (void *)k_pages, .v_pages = (void *)v_pages, .page_stride = page_stride,
         .slot_stride = slot_stride, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .half = half,
         .page_size = page_size, .eps = eps}};
    int64_t width = (int64_t)(q_heads + 2 * kv_heads) * head_dim;
    spread(rope_some, &w, tokens, chunk_of(tokens, width, cpu->num_threads), cpu->num_threads);
}

int penstock_attention(const struct penstock_cpu *cpu, int rows, uintptr_t query_starts, uintptr_t context_lens,
                       uintptr_t block_tables, int64_t table_stride, uintptr_t q, int64_t q_stride,
                       uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride, uintptr_t out,
                       int q_heads, int kv_heads, int head_dim, int page_size, float scale, int window, float cap,
                       uintptr_t sinks) {
    const float log2_e = 1.44269504f;
    struct attention a = {
        .q = (const void *)q, .k_pages = (const void *)k_pages, .v_pages = (const void *)v_pages, .out = (void *)out,
        .q_stride = q_stride, .page_stride = page_stride, .slot_stride = slot_stride, .table_stride = table_stride,
        .query_starts = (const int32_t *)query_starts, .context_lens = (const int32_t *)context_lens,
        .block_tables = (const int32_t *)block_tables, .num_rows = rows, .q_heads = q_heads, .kv_heads = kv_heads,
        .head_dim = head_dim, .page_size = page_size, .window = window, .scale_log2 = (cap ? cap : scale) * log2_e,
        .squeeze = cap ? 2.0f * scale / cap * log2_e : 0.0f, .sinks = (const float *)sinks};
    return attend_batch(levels[cpu->level], cpu->is_bfloat16, &a, cpu->num_threads);
}

struct linear_work {
    const struct cpu_level *level;
    int type;
    struct linear linear;
};

static void linear_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct linear_work *w = work;
    w->level->linear[w->type](&w->linear, first, end);
}

/* A word from memory takes a core as long as ten multiplications. */
#define PRODUCTS_PER_WORD_READ 10

int penstock_cpu_columns(int level) { return levels[level]->columns; }

void penstock_linear(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                     uintptr_t y, int64_t rows, int64_t depth, int64_t width) {
    struct linear_work w = {levels[cpu->level], cpu->is_bfloat16,
                            {.x = (const void *)x, .weight = (const uint32_t *)weight, .bias = (const float *)bias,
                             .y = (void *)y, .rows = rows, .x_stride = x_stride, .depth = depth, .width = width,
                             .row_parts = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS}};
    int64_t columns = w.level->columns, parts = (width + columns - 1) / columns * w.linear.row_parts;
    int64_t cost = depth * width * (rows + PRODUCTS_PER_WORD_READ);
    int num_threads = threads_for(cost, cpu);
    spread(linear_some, &w, parts, parts / (16 * num_threads) + 1, num_threads);
}

struct rows_work {
    const uint32_t *weight;
    const int64_t *numbers;
    uint32_t *y;
    int64_t depth, columns;
};

static void rows_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct rows_work *w = work;
    (void)thread;
    for (int64_t i = first; i < end; i++) {
        int64_t number = w->numbers[i];
        const uint32_t *from = w->weight + number / w->columns * w->depth * w->columns + number % w->columns;
        uint32_t *to = w->y + i * w->depth;
        for (int64_t at = 0; at < w->depth; at++) to[at] = from[at * w->columns];
    }
}

int penstock_linear_rows(const struct penstock_cpu *cpu, uintptr_t weight, uintptr_t numbers, uintptr_t y, int64_t rows,
                         int64_t depth, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        if ((uint64_t)((const int64_t *)numbers)[i] >= (uint64_t)width) return -1;
    struct rows_work w = {(const uint32_t *)weight, (const int64_t *)numbers, (uint32_t *)y, depth,
                          levels[cpu->level]->columns};
    spread(rows_some, &w, rows, 16, rows < 64 ? 1 : cpu->num_threads);
    return 0;
}

struct linears_work {
    const struct cpu_level *level;
    int type;
    const struct linear *linears;
    const int64_t *ends; /* of each layer's parts, counted through all of them */
};

static void linears_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct linears_work *w = work;
    int64_t before = 0;
    for (int i = 0; first < end; before = w->ends[i++]) {
        int64_t last = end < w->ends[i] ? end : w->ends[i];
        if (first >= last) continue;
        w->level->linear[w->type](w->linears + i, first - before, last - before);
        first = last;
    }
}

int penstock_linears(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, int num, uintptr_t weights,
                     uintptr_t biases, uintptr_t counts, uintptr_t y, int64_t depth, int64_t width) {
    const struct cpu_level *level = levels[cpu->level];
    const int64_t *addresses = (const void *)weights, *added = (const void *)biases, *rows = (const void *)counts;
    struct linear *linears = malloc((size_t)num * (sizeof *linears + sizeof(int64_t)));
    if (!linears) return -1;
    int64_t *ends = (int64_t *)(linears + num), parts = 0, cost = 0, row = 0;
    for (int i = 0; i < num; row += rows[i++]) {
        int64_t row_parts = (rows[i] + LINEAR_ROWS - 1) / LINEAR_ROWS;
        linears[i] = (struct linear){.x = (const uint32_t *)x + row * x_stride,
                                     .weight = (const uint32_t *)(uintptr_t)addresses[i],
                                     .bias = (const float *)(uintptr_t)added[i],
                                     .y = (char *)y + row * width * (cpu->is_bfloat16 ? 2 : 4),
                                     .rows = rows[i], .x_stride = x_stride, .depth = depth, .width = width,
                                     .row_parts = row_parts};
        ends[i] = parts += (width + level->columns - 1) / level->columns * row_parts;
        cost += depth * width * (rows[i] + PRODUCTS_PER_WORD_READ);
    }
    struct linears_work w = {level, cpu->is_bfloat16, linears, ends};
    int num_threads = threads_for(cost, cpu);
    spread(linears_some, &w, parts, parts / (16 * num_threads) + 1, num_threads);
    free(linears);
    return 0;
}

struct quantize_work {
    const struct cpu_level *level;
    int type;
    struct quantize quantize;
};

static void quantize_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct quantize_work *w = work;
    w->level->quantize[w->type](&w->quantize, first, end);
}

struct coded_work {
    const struct cpu_level *level;
    int type, num;
    struct coded layers[];
};

static int64_t parts_of(const struct coded_work *w, int i) {
    const struct coded *l = &w->layers[i];
    return (l->width + w->level->coded_columns - 1) / w->level->coded_columns * l->row_parts;
}

static void coded_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct coded_work *w = work;
    for (int i = 0; first < end; i++) {
        int64_t parts = parts_of(w, i);
        if (first < parts) w->level->coded[w->type](&w->layers[i], first, end < parts ? end : parts);
        first = first > parts ? first - parts : 0, end -= parts;
    }
}

int64_t penstock_coded_scratch(int64_t rows, int64_t depth) { return rows * (depth * 4 + depth / CHUNK * 24); }
int penstock_coded_columns(int level) { return levels[level]->coded_columns; }

/* A code read from memory takes a core as long as this many multiplications. */
#define PRODUCTS_PER_CODE_READ 3

/* Taking codes apart again for every few rows costs more where a chunk has two groups, and mostly two planes. */
#define FEW_IN_TWO_GROUPS 8

int penstock_coded(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t scratch, int num,
                   const struct penstock_coded *parts, uintptr_t y, int64_t rows, int64_t depth, int64_t width) {
    const struct cpu_level *level = levels[cpu->level];
    int64_t chunks = rows * depth / CHUNK;
    float *room = (float *)scratch;
    struct integers all_rows = {.rows = rows, .scales = room, .below = {room + chunks, room + 2 * chunks, room + 3 * chunks},
                                .sums = (int32_t *)room + 4 * chunks};
    uint32_t *digits = (uint32_t *)room + 6 * chunks;
    int is_few = rows <= level->few_rows;
    for (int i = 0; i < num && rows > FEW_IN_TWO_GROUPS; i++) is_few &= code_types[parts[i].type].groups == 1;
    all_rows.is_few = is_few;
    if (is_few) all_rows.bytes = digits;
    if (!is_few || !level->has_vnni) all_rows.values = (int16_t *)(digits + rows * depth / 2);
    struct quantize_work q = {level, cpu->is_bfloat16,
                              {.x = (const void *)x, .x_stride = x_stride, .depth = depth, .to = all_rows}};
    spread(quantize_some, &q, rows, chunk_of(rows, depth, cpu->num_threads), cpu->num_threads);
    struct coded_work *w = malloc(sizeof *w + num * sizeof *w->layers);
    if (!w) return -1;
    *w = (struct coded_work){level, cpu->is_bfloat16, num};
    int64_t all = 0, cost = 0;
    for (int i = 0; i < num; i++) {
        const struct penstock_coded *p = &parts[i];
        int64_t count = p->num_rows < 0 ? rows : p->num_rows, first = p->first_row;
        w->layers[i] = (struct coded){
            .type = &code_types[p->type], .x = all_rows, .weight = (const uint8_t *)p->weight,
            .bias = (const float *)p->bias, .first_row = first,
            .y = (char *)y + p->column * (cpu->is_bfloat16 ? 2 : 4), .rows = count, .depth = depth,
            .width = p->width, .y_stride = width, .row_parts = (count + LINEAR_ROWS - 1) / LINEAR_ROWS};
        all += parts_of(w, i);
        cost += depth * p->width * (count + PRODUCTS_PER_CODE_READ);
    }
    int num_threads = threads_for(cost, cpu);
    int64_t chunk = all / (16 * num_threads) + 1;
    for (int i = 0; i < num; i++) w->layers[i].others = chunk * (num_threads - 1);
    spread(coded_some, w, all, chunk, num_threads);
    free(w);
    return 0;
}
