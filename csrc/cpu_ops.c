/* The entry points of the executor's CPU kernels: they select the instruction level and divide tokens among threads.
 * cpu_plan.c divides attention into jobs; cpu_kernels.h includes the kernels. */
#include <stdlib.h>

#include "cpu_level.h"

static const struct cpu_level *const levels[] = {
    &cpu_level_portable,
#if defined(__x86_64__)
    &cpu_level_avx2,
#if !defined(PENSTOCK_WITHOUT_AVX512)
    &cpu_level_avx512,
    &cpu_level_avx512_bf16,
#endif
#endif
};
static const char *const level_names[] = {"portable", "avx2", "avx512", "avx512_bf16"};

int penstock_cpu_instructions(void) {
    int instructions = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        instructions |= PENSTOCK_AVX2;
#if !defined(PENSTOCK_WITHOUT_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        instructions |= PENSTOCK_AVX512;
    if (__builtin_cpu_supports("avx512vnni")) instructions |= PENSTOCK_VNNI;
    if (__builtin_cpu_supports("avx512bf16")) instructions |= PENSTOCK_BF16;
#endif
#endif
    return instructions;
}

int penstock_cpu_best_level(int instructions) {
    const int with_vnni = PENSTOCK_AVX2 | PENSTOCK_AVX512 | PENSTOCK_VNNI, with_bf16 = with_vnni | PENSTOCK_BF16;
    if ((instructions & with_bf16) == with_bf16) return 3;
    if ((instructions & with_vnni) == with_vnni) return 2;
    return instructions & PENSTOCK_AVX2 ? 1 : 0;
}

const char *penstock_cpu_level_name(int level) { return level_names[level]; }

/* A fork and join costs 1 microsecond if the threads spin and 7 if they sleep. The limits for a fork are 20 to 30
 * microseconds of work on one core, those for sharing with a spinning team 1 to 3. */
#define ELEMENTS_WORTH_A_THREAD (1 << 16)
#define ELEMENTS_WORTH_SHARING (1 << 12)
#define PRODUCTS_WORTH_A_FORK (2 << 20)
#define PRODUCTS_WORTH_SHARING (1 << 18)

static int threads_for(int64_t cost, const struct penstock_cpu *cpu) {
    return cost < (has_session() ? PRODUCTS_WORTH_SHARING : PRODUCTS_WORTH_A_FORK) ? 1 : cpu->num_threads;
}

/* Distribute rows that cost `width` elements each over the threads. */
static void spread_rows(const struct penstock_cpu *cpu, range_function *run, const void *op, int64_t rows,
                        int64_t width) {
    int64_t elements = has_session() ? ELEMENTS_WORTH_SHARING : ELEMENTS_WORTH_A_THREAD;
    int64_t least = elements / (width + 1) + 1, even = rows / (4 * cpu->num_threads) + 1;
    parallel_for(run, op, rows, even > least ? even : least, cpu->num_threads);
}

void penstock_norm(const struct penstock_cpu *cpu, const struct penstock_norm *n) {
    spread_rows(cpu, levels[cpu->level]->norm[cpu->is_bfloat16], n, n->rows, n->width);
}

void penstock_gate(const struct penstock_cpu *cpu, const struct penstock_gate *g) {
    spread_rows(cpu, levels[cpu->level]->gate[g->activation][cpu->is_bfloat16], g, g->rows, 2 * g->width);
}

void penstock_rope(const struct penstock_cpu *cpu, const struct penstock_rope *r) {
    int64_t width = (int64_t)(r->q_heads + 2 * r->kv_heads) * r->head_dim;
    spread_rows(cpu, levels[cpu->level]->rope[cpu->is_bfloat16], r, r->tokens, width);
}

int penstock_attention(const struct penstock_cpu *cpu, const struct penstock_attention *a) {
    return attend_batch(levels[cpu->level], cpu, a);
}

void penstock_convolve(const struct penstock_cpu *cpu, const struct penstock_convolution *c) {
    int64_t items = c->states->rows * ((c->channels + CHANNELS - 1) / CHANNELS);
    int64_t cost = c->states->query_starts[c->states->rows] * c->channels * c->taps * 4;
    parallel_for(levels[cpu->level]->convolve[cpu->is_bfloat16], c, items, 1, threads_for(cost, cpu));
}

void penstock_delta_rule(const struct penstock_cpu *cpu, const struct penstock_delta *d) {
    int64_t items = (int64_t)d->states->rows * d->value_heads;
    int64_t cost = (int64_t)d->states->query_starts[d->states->rows] * d->value_heads * d->key_dim * d->value_dim * 4;
    parallel_for(levels[cpu->level]->delta[cpu->is_bfloat16], d, items, 1, threads_for(cost, cpu));
}

int penstock_cpu_columns(int level) { return levels[level]->columns; }
int penstock_coded_columns(int level) {
    const struct quantized_kernels *kernels = levels[level]->quantized;
    return kernels ? kernels->panel_columns : 0;
}

struct copied_rows {
    const struct penstock_rows *rows;
    int64_t columns; /* of a whole block of the weight */
};

static void copy_rows(const void *op, int64_t first, int64_t end, int thread) {
    const struct penstock_rows *r = ((const struct copied_rows *)op)->rows;
    int64_t columns = ((const struct copied_rows *)op)->columns;
    for (int64_t i = first; i < end; i++) {
        int64_t row = r->indices[i];
        int64_t whole = r->width / columns, narrow = (row - whole * columns) / NARROW_COLUMNS;
        struct block block = block_at(row < whole * columns ? row / columns : whole + narrow, r->width, columns);
        const uint32_t *from = (const uint32_t *)r->weight + block.first * r->depth + row - block.first;
        uint32_t *to = (uint32_t *)r->y + i * r->depth;
        for (int64_t at = 0; at < r->depth; at++) to[at] = from[at * block.columns];
    }
}

int penstock_linear_rows(const struct penstock_cpu *cpu, const struct penstock_rows *r) {
    for (int64_t i = 0; i < r->rows; i++)
        if ((uint64_t)r->indices[i] >= (uint64_t)r->width) return -1;
    struct copied_rows copied = {r, levels[cpu->level]->columns};
    parallel_for(copy_rows, &copied, r->rows, 16, r->rows < 64 ? 1 : cpu->num_threads);
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
        range_function *run = p->is_quantized ? w->level->quantized->linear[w->type] : w->level->linear[w->type];
        const void *layer = p->is_quantized ? (const void *)&p->quantized_linear : &p->linear;
        if (first < last) run(layer, first, last, thread);
        first = first > p->items ? first - p->items : 0, end -= p->items;
    }
}

static int has_codes(int num, const struct penstock_part *parts) {
    for (int i = 0; i < num; i++)
        if (parts[i].type >= 0) return 1;
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

static struct quantized_inputs quantize_x(const struct penstock_cpu *cpu, const struct penstock_product *p) {
    const struct quantized_kernels *kernels = levels[cpu->level]->quantized;
    int64_t rows = p->rows, chunks = rows * p->depth / CHUNK;
    float *memory = p->scratch;
    struct quantized_inputs out = {
        .rows = rows, .scales = memory, .sums = (int32_t *)memory + 4 * chunks,
        .negative_sums = {memory + chunks, memory + 2 * chunks, memory + 3 * chunks}};
    uint32_t *values = (uint32_t *)memory + 6 * chunks;
    int uses_bytes = rows <= kernels->max_byte_rows;
    for (int i = 0; i < p->num_parts && rows > MAX_BYTE_ROWS_IN_TWO_GROUPS; i++)
        uses_bytes &= p->parts[i].type < 0 || code_types[p->parts[i].type].groups == 1;
    out.uses_bytes = uses_bytes;
    if (uses_bytes) out.bytes = values;
    if (!uses_bytes || !kernels->has_vnni) out.values = (int16_t *)(values + rows * p->depth / 2);
    struct quantize q = {.x = p->x, .x_stride = p->x_stride, .depth = p->depth, .out = out};
    spread_rows(cpu, kernels->quantize[cpu->is_bfloat16], &q, rows, p->depth);
    return out;
}

int penstock_product(const struct penstock_cpu *cpu, const struct penstock_product *p) {
    const struct cpu_level *level = levels[cpu->level];
    const int per_word = cpu->is_bfloat16 ? 2 : 1, size = cpu->is_bfloat16 ? 2 : 4;
    struct product_work *w = malloc(sizeof *w + p->num_parts * sizeof *w->parts);
    if (!w) return -1;
    struct quantized_inputs quantized = {0};
    if (has_codes(p->num_parts, p->parts)) quantized = quantize_x(cpu, p);
    w->level = level, w->type = cpu->is_bfloat16;
    int64_t all = 0, cost = 0;
    for (int i = 0; i < p->num_parts; i++) {
        const struct penstock_part *source = &p->parts[i];
        int64_t rows = source->num_rows < 0 ? p->rows : source->num_rows, first = source->first_row;
        int64_t row_parts = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, blocks;
        char *y = (char *)p->y + source->column * size;
        struct product *part = &w->parts[i];
        part->is_quantized = source->type >= 0;
        if (part->is_quantized) {
            part->quantized_linear = (struct quantized_linear){
                .type = &code_types[source->type], .x = quantized, .weight = source->weight, .bias = source->bias,
                .first_row = first, .y = y, .rows = rows, .depth = p->depth, .width = source->width,
                .y_stride = p->width, .row_parts = row_parts};
            cost += p->depth * source->width * (rows + PRODUCTS_PER_CODE_READ);
            blocks = (source->width + level->quantized->panel_columns - 1) / level->quantized->panel_columns;
        } else {
            int has_pairs = cpu->is_bfloat16 || source->type == PENSTOCK_PAIRS;
            int64_t depth = (source->depth ? source->depth : p->depth) / (has_pairs ? 2 : 1);
            int is_by_rows = depth <= SMALL_DEPTH, part_rows = is_by_rows ? FEW_ROWS : LINEAR_ROWS;
            blocks = num_blocks(source->width, level->columns);
            row_parts = (rows + part_rows - 1) / part_rows;
            part->linear = (struct linear){
                .x = (const char *)p->x + (first * p->x_stride + source->input) * size, .weight = source->weight,
                .bias = source->bias, .y = y + first * p->width * size, .rows = rows,
                .x_stride = p->x_stride / per_word, .depth = depth, .width = source->width, .y_stride = p->width,
                .part_rows = part_rows, .inner_parts = is_by_rows ? blocks : row_parts, .is_by_rows = is_by_rows,
                .has_pairs = has_pairs, .adds = p->adds};
            cost += depth * source->width * (rows + PRODUCTS_PER_WORD_READ);
        }
        all += part->items = blocks * row_parts;
    }
    int num_threads = threads_for(cost, cpu);
    int64_t chunk = all / (16 * num_threads) + 1;
    for (int i = 0; i < p->num_parts; i++) w->parts[i].quantized_linear.parts_between = chunk * (num_threads - 1);
    parallel_for(product_items, w, all, chunk, num_threads);
    free(w);
    return 0;
}

/* Two products with a part for each run: x down of all adapters, then up added to y. */
int penstock_adapt(const struct penstock_cpu *cpu, const struct penstock_adapt *a) {
    int64_t num_ups = 0, rank = 0, rows = 0;
    for (int i = 0; i < a->num_runs; i++) {
        const struct penstock_adapter *adapter = &a->runs[i].adapters[a->product];
        num_ups += adapter->num_ups;
        if (adapter->num_ups && adapter->down.width > rank) rank = adapter->down.width;
        rows = a->runs[i].first + a->runs[i].count;
    }
    if (!num_ups) return 0;
    int64_t inner_bytes = rows * rank * (cpu->is_bfloat16 ? 2 : 4);
    struct penstock_part *parts = malloc((a->num_runs + num_ups) * sizeof *parts + inner_bytes);
    if (!parts) return -1;
    struct penstock_part *ups = parts + a->num_runs, *down = parts, *up = ups;
    for (int i = 0; i < a->num_runs; i++) {
        const struct penstock_run *run = &a->runs[i];
        const struct penstock_adapter *adapter = &run->adapters[a->product];
        if (!adapter->num_ups) continue;
        *down = adapter->down;
        down->first_row = run->first, down->num_rows = run->count;
        down++;
        for (int j = 0; j < adapter->num_ups; j++, up++) {
            *up = adapter->ups[j];
            up->first_row = run->first, up->num_rows = run->count;
        }
    }
    void *inner = ups + num_ups;
    struct penstock_product first = {.x = a->x, .y = inner, .parts = parts, .num_parts = (int)(down - parts),
                                     .x_stride = a->x_stride, .rows = rows, .depth = a->depth, .width = rank};
    struct penstock_product second = {.x = inner, .y = a->y, .parts = ups, .num_parts = (int)num_ups,
                                      .x_stride = rank, .rows = rows, .depth = rank, .width = a->y_stride, .adds = 1};
    int failed = penstock_product(cpu, &first) || penstock_product(cpu, &second);
    free(parts);
    return failed ? -1 : 0;
}
