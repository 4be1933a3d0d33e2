/* Runs all layers of a decoder in one call. With a few tokens, calls from Python would take as long as the kernels. */
#include <stddef.h>
#include <stdint.h>

#include "cpu_level.h"
#include "cpu_ops.cdef.h"
#include "cpu_recurrent.cdef.h"
#include "cpu_threads.h"

#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* The buffers of a layer, as sizes in bytes or as addresses: the normed input, the output of the projection to heads,
 * the rotated queries or convolved channels, the outputs of attention, gate_up and the gate, quantized inputs. */
struct buffers {
    int64_t hidden, heads, query, attended, gate_up, gated, quantized;
};

/* Return the number of values per token of a recurrent layer; 0 for other layers. */
static int64_t values_of(const struct penstock_layer *l) {
    return l->delta ? (int64_t)l->delta->value_heads * l->delta->value_dim : 0;
}

static int64_t channels_of(const struct penstock_layer *l) {
    return l->delta ? 2 * (int64_t)l->delta->key_heads * l->delta->key_dim + values_of(l) : 0;
}

static struct buffers sizes_of(const struct penstock_cpu *cpu, const struct penstock_layers *l, int64_t tokens) {
    int64_t size = cpu->is_bfloat16 ? 2 : 4, query = (int64_t)l->q_heads * l->head_dim;
    struct buffers buffers = {.query = ALIGNED(tokens * query * size), .attended = ALIGNED(tokens * query * size)};
    for (int i = 0; i < l->num; i++) {
        const struct penstock_layer *layer = &l->layers[i];
        const struct penstock_projection *all[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down,
                                                   &layer->gates};
#define AT_LEAST(field, bytes) buffers.field = buffers.field > (bytes) ? buffers.field : (bytes)
        AT_LEAST(hidden, ALIGNED(tokens * layer->output.width * size));
        AT_LEAST(heads, ALIGNED(tokens * layer->qkv.width * size));
        AT_LEAST(gate_up, ALIGNED(tokens * layer->gate_up.width * size));
        AT_LEAST(gated, ALIGNED(tokens * layer->gate_up.width / 2 * size));
        AT_LEAST(gated, ALIGNED(tokens * layer->gates.width * size));
        AT_LEAST(query, ALIGNED(tokens * channels_of(layer) * size));
        AT_LEAST(attended, ALIGNED(tokens * values_of(layer) * size));
        for (int p = 0; p < 5; p++)
            AT_LEAST(quantized,
                     ALIGNED(penstock_product_scratch(all[p]->num_parts, all[p]->parts, tokens, all[p]->depth)));
#undef AT_LEAST
    }
    return buffers;
}

int64_t penstock_layers_scratch(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens) {
    struct buffers r = sizes_of(cpu, layers, tokens);
    return r.hidden + r.heads + r.query + r.attended + r.gate_up + r.gated + r.quantized;
}

/* The arguments and the result of penstock_run_layers. */
struct run {
    const struct penstock_cpu *cpu;
    const struct penstock_layers *layers;
    int64_t tokens, table_stride;
    const uintptr_t *kv_slots, *block_tables; /* indexed by a layer's group */
    const struct penstock_states *states; /* base and first_unit are a layer's */
    uintptr_t positions, query_starts, context_lens, residual, update, scratch;
    const struct penstock_run *runs;
    int rows, failed, num_runs;
};

/* `product`: the index of the projection among those that LoRA adapters may change; -1: it is not one of them. */
static int project(const struct run *run, const struct penstock_projection *p, int product, uintptr_t x, uintptr_t y,
                   uintptr_t quantized) {
    int failed = penstock_product(run->cpu, x, p->depth, quantized, p->num_parts, p->parts, y, run->tokens, p->depth,
                                  p->width);
    if (run->num_runs && product >= 0)
        penstock_adapt(run->cpu, x, p->depth, y, p->width, p->depth, run->num_runs, run->runs, product);
    return failed;
}

/* Compute `attended` from `heads`. `at` has the addresses of the buffers. */
static int run_attention(const struct run *run, const struct penstock_layer *l, const struct buffers *at) {
    const struct penstock_layers *s = run->layers;
    int64_t size = run->cpu->is_bfloat16 ? 2 : 4, wide = l->qkv.width;
    int64_t q_width = (int64_t)s->q_heads * s->head_dim, kv_width = (int64_t)s->kv_heads * s->head_dim;
    uintptr_t gates = at->heads + q_width * size, key = s->has_gate ? gates + q_width * size : gates;
    penstock_rope(run->cpu, run->tokens, at->heads, wide, key, wide, key + kv_width * size, wide, l->cos, l->sin,
                  l->half, run->positions, run->kv_slots[l->group], l->q_norm, l->k_norm, s->eps, at->query, l->k_pages,
                  l->v_pages, s->page_stride, s->slot_stride, s->q_heads, s->kv_heads, s->head_dim, s->page_size);
    int failed = penstock_attention(run->cpu, run->rows, run->query_starts, run->context_lens,
                                    run->block_tables[l->group], run->table_stride, at->query, q_width, l->k_pages,
                                    l->v_pages, s->page_stride, s->slot_stride, at->attended, s->q_heads, s->kv_heads,
                                    s->head_dim, s->page_size, s->scale, l->window, s->cap, l->sinks);
    if (s->has_gate)
        penstock_gate(run->cpu, SIGMOID, gates, wide, at->attended, q_width, at->attended, run->tokens, q_width);
    return failed;
}

/* Compute `attended` from `hidden` and `heads` in a recurrent layer. */
static int run_recurrent(const struct run *run, const struct penstock_layer *l, const struct buffers *at) {
    int64_t channels = channels_of(l), size = run->cpu->is_bfloat16 ? 2 : 4;
    struct penstock_states states = *run->states;
    states.base = l->states, states.first_unit = l->first_unit;
    struct penstock_delta delta = *l->delta;
    delta.qkv = at->query, delta.qkv_stride = channels;
    delta.z = at->heads + channels * size, delta.z_stride = l->qkv.width;
    delta.gates = at->gated, delta.gates_stride = l->gates.width;
    delta.out = at->attended;
    int failed = project(run, &l->gates, -1, at->hidden, at->gated, at->quantized);
    penstock_convolve(run->cpu, &states, at->heads, l->qkv.width, l->taps, 0, at->query, channels, l->num_taps, 1);
    penstock_delta_rule(run->cpu, &states, &delta);
    return failed;
}

static void run_layers(void *data) {
    struct run *run = data;
    const struct penstock_cpu *cpu = run->cpu;
    const struct penstock_layers *layers = run->layers;
    int64_t tokens = run->tokens;
    uintptr_t residual = run->residual, update = run->update;
    struct buffers r = sizes_of(cpu, layers, tokens), at = {.hidden = run->scratch};
    at.heads = at.hidden + r.hidden, at.query = at.heads + r.heads, at.attended = at.query + r.query;
    at.gate_up = at.attended + r.attended, at.gated = at.gate_up + r.gate_up, at.quantized = at.gated + r.gated;
    for (int i = 0; i < layers->num; i++) {
        const struct penstock_layer *l = &layers->layers[i];
        int64_t width = l->output.width;
        if (i == 0) penstock_norm(cpu, residual, width, 0, 0, l->input_norm, at.hidden, 0, tokens, width, layers->eps);
        else
            penstock_norm(cpu, update, width, residual, width, l->input_norm, at.hidden, residual, tokens, width,
                          layers->eps);
        int failed = project(run, &l->qkv, l->delta ? -1 : l->product, at.hidden, at.heads, at.quantized);
        failed |= l->delta ? run_recurrent(run, l, &at) : run_attention(run, l, &at);
        failed |= project(run, &l->output, l->product + 1, at.attended, update, at.quantized);
        if (l->attention_norm)
            penstock_norm(cpu, update, width, 0, 0, l->attention_norm, update, 0, tokens, width, layers->eps);
        penstock_norm(cpu, update, width, residual, width, l->mlp_norm, at.hidden, residual, tokens, width,
                      layers->eps);
        failed |= project(run, &l->gate_up, l->product + 2, at.hidden, at.gate_up, at.quantized);
        int64_t wide = l->gate_up.width, half = wide / 2;
        uintptr_t up = at.gate_up + half * (cpu->is_bfloat16 ? 2 : 4);
        penstock_gate(cpu, layers->activation, at.gate_up, wide, up, wide, at.gated, tokens, half);
        failed |= project(run, &l->down, l->product + 3, at.gated, update, at.quantized);
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
                        const struct penstock_states *states, uintptr_t residual, uintptr_t update, uintptr_t scratch,
                        int num_runs, const struct penstock_run *runs) {
    struct run run = {.cpu = cpu, .layers = layers, .tokens = tokens, .table_stride = table_stride,
                      .positions = positions, .kv_slots = kv_slots, .query_starts = query_starts,
                      .context_lens = context_lens, .block_tables = block_tables, .states = states,
                      .residual = residual, .update = update, .scratch = scratch, .rows = rows, .num_runs = num_runs,
                      .runs = runs};
    with_team(run_layers, &run, cpu->num_threads);
    return run.failed;
}
