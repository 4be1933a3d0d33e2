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

void penstock_norm(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t residual,
                   int64_t residual_stride, uintptr_t weight, uintptr_t y, uintptr_t total, int64_t rows,
                   int64_t width, float eps) {
    struct norm norm = {.x = (const void *)x, .residual = (const void *)residual, .weight = (const float *)weight,
                        .y = (void *)y, .total = (void *)total, .x_stride = x_stride,
                        .residual_stride = residual_stride, .width = width, .eps = eps};
    work_on *run = levels[cpu->level]->norm[cpu->is_bfloat16];
    spread(run, &norm, rows, chunk_of(rows, width, cpu->num_threads), cpu->num_threads);
}

void penstock_gate(const struct penstock_cpu *cpu, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                   int64_t up_stride, uintptr_t out, int64_t rows, int64_t width) {
    struct gate given = {.gate = (const void *)gate, .up = (const void *)up, .out = (void *)out,
                         .gate_stride = gate_stride, .up_stride = up_stride, .width = width};
    work_on *run = levels[cpu->level]->gate[activation][cpu->is_bfloat16];
    spread(run, &given, rows, chunk_of(rows, 2 * width, cpu->num_threads), cpu->num_threads);
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
    int64_t chunk = chunk_of(tokens, (int64_t)(q_heads + 2 * kv_heads) * head_dim, cpu->num_threads);
    spread(levels[cpu->level]->rope[cpu->is_bfloat16], &rope, tokens, chunk, cpu->num_threads);
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
int penstock_coded_columns(int level) { return levels[level]->coded_columns; }

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

/* The parts of a layer: numbers or codes, each with its own number of items to share out. */
struct product {
    int64_t items;
    int is_coded;
    struct linear linear;
    struct coded coded;
};

struct product_work {
    const struct cpu_level *level;
    int type;
    struct product parts[];
};

static void product_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct product_work *w = work;
    for (const struct product *p = w->parts; first < end; p++) {
        int64_t last = end < p->items ? end : p->items;
        if (first < last && p->is_coded) w->level->coded[w->type](&p->coded, first, last, thread);
        else if (first < last) w->level->linear[w->type](&p->linear, first, last, thread);
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

/* A word from memory takes a core as long as ten multiplications, a code as long as three. */
#define PRODUCTS_PER_WORD_READ 10
#define PRODUCTS_PER_CODE_READ 3

/* Taking codes apart again for every few rows costs more where a chunk has two groups, and mostly two planes. */
#define FEW_IN_TWO_GROUPS 8

static struct integers quantized(const struct penstock_cpu *cpu, int num, const struct penstock_part *parts, uintptr_t x,
                                 int64_t x_stride, uintptr_t scratch, int64_t rows, int64_t depth) {
    const struct cpu_level *level = levels[cpu->level];
    int64_t chunks = rows * depth / CHUNK;
    float *room = (float *)scratch;
    struct integers all_rows = {.rows = rows, .scales = room, .below = {room + chunks, room + 2 * chunks, room + 3 * chunks},
                                .sums = (int32_t *)room + 4 * chunks};
    uint32_t *digits = (uint32_t *)room + 6 * chunks;
    int is_few = rows <= level->few_rows;
    for (int i = 0; i < num && rows > FEW_IN_TWO_GROUPS; i++)
        is_few &= parts[i].type == PENSTOCK_NUMBERS || code_types[parts[i].type].groups == 1;
    all_rows.is_few = is_few;
    if (is_few) all_rows.bytes = digits;
    if (!is_few || !level->has_vnni) all_rows.values = (int16_t *)(digits + rows * depth / 2);
    struct quantize q = {.x = (const void *)x, .x_stride = x_stride, .depth = depth, .to = all_rows};
    spread(level->quantize[cpu->is_bfloat16], &q, rows, chunk_of(rows, depth, cpu->num_threads), cpu->num_threads);
    return all_rows;
}

int penstock_product(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t scratch, int num,
                     const struct penstock_part *parts, uintptr_t y, int64_t rows, int64_t depth, int64_t width) {
    const struct cpu_level *level = levels[cpu->level];
    const int per_word = cpu->is_bfloat16 ? 2 : 1, size = cpu->is_bfloat16 ? 2 : 4;
    struct product_work *w = malloc(sizeof *w + num * sizeof *w->parts);
    if (!w) return -1;
    struct integers integers = {0};
    if (has_codes(num, parts)) integers = quantized(cpu, num, parts, x, x_stride, scratch, rows, depth);
    w->level = level, w->type = cpu->is_bfloat16;
    int64_t all = 0, cost = 0;
    for (int i = 0; i < num; i++) {
        const struct penstock_part *p = &parts[i];
        int64_t count = p->num_rows < 0 ? rows : p->num_rows, first = p->first_row;
        int64_t row_parts = (count + LINEAR_ROWS - 1) / LINEAR_ROWS;
        char *to = (char *)y + p->column * size;
        struct product *made = &w->parts[i];
        made->is_coded = p->type != PENSTOCK_NUMBERS;
        if (made->is_coded) {
            made->coded = (struct coded){
                .type = &code_types[p->type], .x = integers, .weight = (const uint8_t *)p->weight,
                .bias = (const float *)p->bias, .first_row = first, .y = to, .rows = count, .depth = depth,
                .width = p->width, .y_stride = width, .row_parts = row_parts};
            cost += depth * p->width * (count + PRODUCTS_PER_CODE_READ);
        } else {
            made->linear = (struct linear){
                .x = (const char *)x + first * x_stride * size, .weight = (const uint32_t *)p->weight,
                .bias = (const float *)p->bias, .y = to + first * width * size, .rows = count,
                .x_stride = x_stride / per_word, .depth = depth / per_word, .width = p->width, .y_stride = width,
                .row_parts = row_parts};
            cost += depth / per_word * p->width * (count + PRODUCTS_PER_WORD_READ);
        }
        int64_t columns = made->is_coded ? level->coded_columns : level->columns;
        all += made->items = (p->width + columns - 1) / columns * row_parts;
    }
    int num_threads = threads_for(cost, cpu);
    int64_t chunk = all / (16 * num_threads) + 1;
    for (int i = 0; i < num; i++) w->parts[i].coded.others = chunk * (num_threads - 1);
    spread(product_some, w, all, chunk, num_threads);
    free(w);
    return 0;
}
