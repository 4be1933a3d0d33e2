/* The entry points of the executor's CPU kernels: they select the instruction level and divide tokens among threads.
 * cpu_plan.c divides attention into jobs; cpu_kernels.h includes the kernels. */
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

/* A fork and join costs 1 microsecond if the threads spin and 7 if they sleep. The limits for a fork are 20 to 30
 * microseconds of work on one core, those for sharing with a spinning team 1 to 3. */
#define ELEMENTS_WORTH_A_THREAD (1 << 16)
#define ELEMENTS_WORTH_SHARING (1 << 12)
#define PRODUCTS_WORTH_A_FORK (2 << 20)
#define PRODUCTS_WORTH_SHARING (1 << 18)

int threads_for(int64_t cost, const struct penstock_cpu *cpu) {
    return cost < (has_session() ? PRODUCTS_WORTH_SHARING : PRODUCTS_WORTH_A_FORK) ? 1 : cpu->num_threads;
}

static int64_t chunk_size(int64_t rows, int64_t width, int num_threads) {
    int64_t elements = has_session() ? ELEMENTS_WORTH_SHARING : ELEMENTS_WORTH_A_THREAD;
    int64_t least = elements / (width + 1) + 1, even = rows / (4 * num_threads) + 1;
    return even > least ? even : least;
}

void penstock_norm(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t residual,
                   int64_t residual_stride, uintptr_t weight, uintptr_t y, uintptr_t total, int64_t rows,
                   int64_t width, float eps) {
    struct norm norm = {.x = (const void *)x, .residual = (const void *)residual, .weight = (const float *)weight,
                        .y = (void *)y, .total = (void *)total, .x_stride = x_stride,
                        .residual_stride = residual_stride, .width = width, .eps = eps};
    range_function *run = levels[cpu->level]->norm[cpu->is_bfloat16];
    parallel_for(run, &norm, rows, chunk_size(rows, width, cpu->num_threads), cpu->num_threads);
}

void penstock_gate(const struct penstock_cpu *cpu, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                   int64_t up_stride, uintptr_t out, int64_t rows, int64_t width) {
    struct gate arguments = {.gate = (const void *)gate, .up = (const void *)up, .out = (void *)out,
                             .gate_stride = gate_stride, .up_stride = up_stride, .width = width};
    range_function *run = levels[cpu->level]->gate[activation][cpu->is_bfloat16];
    parallel_for(run, &arguments, rows, chunk_size(rows, 2 * width, cpu->num_threads), cpu->num_threads);
}

void penstock_rope(const struct penstock_cpu *cpu, int64_t tokens, uintptr_t q, int64_t q_stride, uintptr_t k,
                   int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t cos, uintptr_t sin, int half,
                   uintptr_t positions, uintptr_t kv_slots, uintptr_t q_weight, uintptr_t k_weight, float eps,
                   uintptr_t q_out, uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride,
                   int q_heads, int kv_heads, int head_dim, int page_size) {
    struct rope rope = {
        .q = (const void *)q, .k = (const void *)k, .v = (const void *)v, .q_stride = q_stride,
        .k_stride = k_stride, .v_stride = v_stride, .cos = (const float *)cos, .sin = (const float *)sin,
        .positions = (const int32_t *)positions, .kv_slots = (const int64_t *)kv_slots,
        .q_weight = (const float *)q_weight, .k_weight = (const float *)k_weight, .q_out = (void *)q_out,
        .k_pages = (void *)k_pages, .v_pages = (void *)v_pages, .page_stride = page_stride,
        .slot_stride = slot_stride, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .half = half,
        .page_size = page_size, .eps = eps};
    int64_t chunk = chunk_size(tokens, (int64_t)(q_heads + 2 * kv_heads) * head_dim, cpu->num_threads);
    parallel_for(levels[cpu->level]->rope[cpu->is_bfloat16], &rope, tokens, chunk, cpu->num_threads);
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

int penstock_cpu_columns(int level) { return levels[level]->columns; }
int penstock_coded_columns(int level) { return levels[level]->panel_columns; }

struct rows_work {
    const uint32_t *weight;
    const int64_t *indices;
    uint32_t *y;
    int64_t depth, columns;
};

static void copy_rows(const void *work, int64_t first, int64_t end, int thread) {
    const struct rows_work *w = work;
    (void)thread;
    for (int64_t i = first; i < end; i++) {
        int64_t row = w->indices[i];
        const uint32_t *from = w->weight + row / w->columns * w->depth * w->columns + row % w->columns;
        uint32_t *to = w->y + i * w->depth;
        for (int64_t at = 0; at < w->depth; at++) to[at] = from[at * w->columns];
    }
}

int penstock_linear_rows(const struct penstock_cpu *cpu, uintptr_t weight, uintptr_t indices, uintptr_t y, int64_t rows,
                         int64_t depth, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        if ((uint64_t)((const int64_t *)indices)[i] >= (uint64_t)width) return -1;
    struct rows_work w = {(const uint32_t *)weight, (const int64_t *)indices, (uint32_t *)y, depth,
                          levels[cpu->level]->columns};
    parallel_for(copy_rows, &w, rows, 16, rows < 64 ? 1 : cpu->num_threads);
    return 0;
}

/* A part of a layer, with a plain or a quantized weight, and its number of items to divide among threads. */
struct product {
    int64_t items;
    int is_quantized;
    struct linear linear;
    struct quantized_linear quantized_linear;
};

struct product_work {
    const struct cpu_level *level;
    int type;
    struct product parts[];
};

static void product_items(const void *work, int64_t first, int64_t end, int thread) {
    const struct product_work *w = work;
    for (const struct product *p = w->parts; first < end; p++) {
        int64_t last = end < p->items ? end : p->items;
        range_function *run = p->is_quantized ? w->level->quantized_linear[w->type] : w->level->linear[w->type];
        const void *layer = p->is_quantized ? (const void *)&p->quantized_linear : &p->linear;
        if (first < last) run(layer, first, last, thread);
        first = first > p->items ? first - p->items : 0, end -= p->items;
    }
}

static int has_codes(int num, const struct penstock_part *parts) {
    for (int i = 0; i < num; i++)
        if (parts[i].type != PENSTOCK_NUMBERS) return 1;
    return 0;
}

int64_t penstock_product_scratch(int num, const struct penstock_part *parts, int64_t rows, int64_t depth) {
    return has_codes(num, parts) ? rows * (depth * 4 + depth / CHUNK * 24) : 0;
}

/* A core takes as long to load a word from memory as for ten multiplications, to load a code as for three. */
#define PRODUCTS_PER_WORD_READ 10
#define PRODUCTS_PER_CODE_READ 3

/* Unpacking codes again for each batch of rows costs more if a chunk has two groups (and most often two planes). */
#define MAX_BYTE_ROWS_IN_TWO_GROUPS 8

static struct quantized_inputs quantize_x(const struct penstock_cpu *cpu, int num, const struct penstock_part *parts,
                                          uintptr_t x, int64_t x_stride, uintptr_t scratch, int64_t rows,
                                          int64_t depth) {
    const struct cpu_level *level = levels[cpu->level];
    int64_t chunks = rows * depth / CHUNK;
    float *memory = (float *)scratch;
    struct quantized_inputs inputs = {
        .rows = rows, .scales = memory, .sums = (int32_t *)memory + 4 * chunks,
        .negative_sums = {memory + chunks, memory + 2 * chunks, memory + 3 * chunks}};
    uint32_t *values = (uint32_t *)memory + 6 * chunks;
    int uses_bytes = rows <= level->max_byte_rows;
    for (int i = 0; i < num && rows > MAX_BYTE_ROWS_IN_TWO_GROUPS; i++)
        uses_bytes &= parts[i].type == PENSTOCK_NUMBERS || code_types[parts[i].type].groups == 1;
    inputs.uses_bytes = uses_bytes;
    if (uses_bytes) inputs.bytes = values;
    if (!uses_bytes || !level->has_vnni) inputs.values = (int16_t *)(values + rows * depth / 2);
    struct quantize q = {.x = (const void *)x, .x_stride = x_stride, .depth = depth, .out = inputs};
    int64_t chunk = chunk_size(rows, depth, cpu->num_threads);
    parallel_for(level->quantize[cpu->is_bfloat16], &q, rows, chunk, cpu->num_threads);
    return inputs;
}

int penstock_product(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t scratch, int num,
                     const struct penstock_part *parts, uintptr_t y, int64_t rows, int64_t depth, int64_t width) {
    const struct cpu_level *level = levels[cpu->level];
    const int per_word = cpu->is_bfloat16 ? 2 : 1, size = cpu->is_bfloat16 ? 2 : 4;
    struct product_work *w = malloc(sizeof *w + num * sizeof *w->parts);
    if (!w) return -1;
    struct quantized_inputs inputs = {0};
    if (has_codes(num, parts)) inputs = quantize_x(cpu, num, parts, x, x_stride, scratch, rows, depth);
    w->level = level, w->type = cpu->is_bfloat16;
    int64_t all = 0, cost = 0;
    for (int i = 0; i < num; i++) {
        const struct penstock_part *p = &parts[i];
        int64_t count = p->num_rows < 0 ? rows : p->num_rows, first = p->first_row;
        int64_t row_parts = (count + LINEAR_ROWS - 1) / LINEAR_ROWS;
        char *to = (char *)y + p->column * size;
        struct product *part = &w->parts[i];
        part->is_quantized = p->type != PENSTOCK_NUMBERS;
        if (part->is_quantized) {
            part->quantized_linear = (struct quantized_linear){
                .type = &code_types[p->type], .x = inputs, .weight = (const uint8_t *)p->weight,
                .bias = (const float *)p->bias, .first_row = first, .y = to, .rows = count, .depth = depth,
                .width = p->width, .y_stride = width, .row_parts = row_parts};
            cost += depth * p->width * (count + PRODUCTS_PER_CODE_READ);
        } else {
            part->linear = (struct linear){
                .x = (const char *)x + first * x_stride * size, .weight = (const uint32_t *)p->weight,
                .bias = (const float *)p->bias, .y = to + first * width * size, .rows = count,
                .x_stride = x_stride / per_word, .depth = depth / per_word, .width = p->width, .y_stride = width,
                .row_parts = row_parts};
            cost += depth / per_word * p->width * (count + PRODUCTS_PER_WORD_READ);
        }
        int64_t columns = part->is_quantized ? level->panel_columns : level->columns;
        all += part->items = (p->width + columns - 1) / columns * row_parts;
    }
    int num_threads = threads_for(cost, cpu);
    int64_t chunk = all / (16 * num_threads) + 1;
    for (int i = 0; i < num; i++) w->parts[i].quantized_linear.parts_between = chunk * (num_threads - 1);
    parallel_for(product_items, w, all, chunk, num_threads);
    free(w);
    return 0;
}
