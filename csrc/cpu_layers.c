/* The layers of a dense decoder in one call: Python would take as long around their kernels as a few tokens do in them. */
#include <stddef.h>
#include <stdint.h>

#include "cpu_ops.cdef.h"
#include "cpu_threads.h"

#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* Rows on their way through a layer, in bytes: normed, projected to heads and rotated, attended, gated, as integers. */
struct room {
    int64_t hidden, heads, query, attended, gate_up, gated, integers;
};

static struct room room_of(const struct penstock_cpu *cpu, const struct penstock_layers *l, int64_t tokens) {
    int64_t size = cpu->is_bfloat16 ? 2 : 4, query = (int64_t)l->q_heads * l->head_dim;
    struct room room = {.query = ALIGNED(tokens * query * size), .attended = ALIGNED(tokens * query * size)};
    for (int i = 0; i < l->num; i++) {
        const struct penstock_layer *layer = &l->layers[i];
        const struct penstock_projection *all[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
#define AT_LEAST(field, bytes) room.field = room.field > (bytes) ? room.field : (bytes)
        AT_LEAST(hidden, ALIGNED(tokens * layer->output.width * size));
        AT_LEAST(heads, ALIGNED(tokens * layer->qkv.width * size));
        AT_LEAST(gate_up, ALIGNED(tokens * layer->gate_up.width * size));
        AT_LEAST(gated, ALIGNED(tokens * layer->gate_up.width / 2 * size));
        for (int p = 0; p < 4; p++)
            if (all[p]->num_parts) AT_LEAST(integers, ALIGNED(penstock_coded_scratch(tokens, all[p]->depth)));
#undef AT_LEAST
    }
    return room;
}

int64_t penstock_layers_scratch(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens) {
    struct room r = room_of(cpu, layers, tokens);
    return r.hidden + r.heads + r.query + r.attended + r.gate_up + r.gated + r.integers;
}

/* What penstock_run_layers was given, and whether it failed. */
struct run {
    const struct penstock_cpu *cpu;
    const struct penstock_layers *layers;
    int64_t tokens, table_stride;
    const uintptr_t *kv_slots, *block_tables; /* by the layer's group */
    uintptr_t positions, query_starts, context_lens, residual, update, scratch;
    const struct penstock_run *runs;
    int rows, failed, num_runs;
};

/* `product`: its number among those of all layers, by which adapters know it. */
static int project(const struct run *run, const struct penstock_projection *p, int product, uintptr_t x, uintptr_t y,
                   uintptr_t integers) {
    int failed = 0;
    if (p->num_parts)
        failed = penstock_coded(run->cpu, x, p->depth, integers, p->num_parts, p->parts, y, run->tokens, p->depth,
                                p->width);
    else penstock_linear(run->cpu, x, p->depth, p->weight, p->bias, y, run->tokens, p->depth, p->width);
    int64_t depth = p->num_parts || !run->cpu->is_bfloat16 ? p->depth : 2 * p->depth; /* else it counts pairs */
    if (run->num_runs) penstock_adapt(run->cpu, x, depth, y, p->width, depth, run->num_runs, run->runs, product);
    return failed;
}

static void run_layers(void *data) {
    struct run *run = data;
    const struct penstock_cpu *cpu = run->cpu;
    const struct penstock_layers *layers = run->layers;
    int64_t tokens = run->tokens;
    uintptr_t residual = run->residual, update = run->update;
    struct room r = room_of(cpu, layers, tokens);
    uintptr_t hidden = run->scratch, heads = hidden + r.hidden, query = heads + r.heads, attended = query + r.query;
    uintptr_t gate_up = attended + r.attended, gated = gate_up + r.gate_up, integers = gated + r.gated;
    int64_t size = cpu->is_bfloat16 ? 2 : 4, q_width = (int64_t)layers->q_heads * layers->head_dim;
    int64_t kv_width = (int64_t)layers->kv_heads * layers->head_dim;
    for (int i = 0; i < layers->num; i++) {
        const struct penstock_layer *l = &layers->layers[i];
        int64_t width = l->output.width, wide = l->qkv.width;
        uintptr_t key = heads + q_width * size;
        if (i == 0) penstock_norm(cpu, residual, width, 0, 0, l->input_norm, hidden, 0, tokens, width, layers->eps);
        else
            penstock_norm(cpu, update, width, residual, width, l->input_norm, hidden, residual, tokens, width,
                          layers->eps);
        int failed = project(run, &l->qkv, 4 * i, hidden, heads, integers);
        penstock_rope(cpu, tokens, heads, wide, key, wide, key + kv_width * size, wide, l->cos, l->sin, l->half,
                      run->positions, run->kv_slots[l->group], l->q_norm, l->k_norm, layers->eps, query, l->k_pages, l->v_pages,
                      layers->page_stride, layers->slot_stride, layers->q_heads, layers->kv_heads, layers->head_dim,
                      layers->page_size);
        failed |= penstock_attention(cpu, run->rows, run->query_starts, run->context_lens,
                                     run->block_tables[l->group], run->table_stride, query, q_width,
                                     l->k_pages, l->v_pages, layers->page_stride, layers->slot_stride, attended,
                                     layers->q_heads, layers->kv_heads, layers->head_dim, layers->page_size,
                                     layers->scale, l->window, layers->cap, l->sinks);
        failed |= project(run, &l->output, 4 * i + 1, attended, update, integers);
        if (l->attention_norm)
            penstock_norm(cpu, update, width, 0, 0, l->attention_norm, update, 0, tokens, width, layers->eps);
        penstock_norm(cpu, update, width, residual, width, l->mlp_norm, hidden, residual, tokens, width, layers->eps);
        failed |= project(run, &l->gate_up, 4 * i + 2, hidden, gate_up, integers);
        penstock_gate(cpu, layers->activation, gate_up, l->gate_up.width, gated, tokens, l->gate_up.width / 2);
        failed |= project(run, &l->down, 4 * i + 3, gated, update, integers);
        if (l->output_norm)
            penstock_norm(cpu, update, width, 0, 0, l->output_norm, update, 0, tokens, width, layers->eps);
        if (failed) {
            run->failed = -1;
            return;
        }
    }
}

int penstock_run_layers(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens,
                        uintptr_t positions, const uintptr_t *kv_slots, int rows, uintptr_t query_starts,
                        uintptr_t context_lens, const uintptr_t *block_tables, int64_t table_stride,
                        uintptr_t residual, uintptr_t update, uintptr_t scratch, int num_runs,
                        const struct penstock_run *runs) {
    struct run run = {.cpu = cpu, .layers = layers, .tokens = tokens, .table_stride = table_stride,
                      .positions = positions, .kv_slots = kv_slots, .query_starts = query_starts,
                      .context_lens = context_lens, .block_tables = block_tables, .residual = residual,
                      .update = update, .scratch = scratch, .rows = rows, .num_runs = num_runs, .runs = runs};
    with_team(run_layers, &run, cpu->num_threads);
    return run.failed;
}
