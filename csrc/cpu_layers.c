/* Runs all layers of a decoder in one call. With a few tokens, calls from Python would take as long as the kernels. */
#include "cpu_level.h"

#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* The buffers of a layer, as sizes in bytes: the normed input, the output of the projection to heads,
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

struct run {
    const struct penstock_cpu *cpu;
    const struct penstock_step *step;
    int failed;
};

/* The addresses of the buffers. */
struct memory {
    char *hidden, *heads, *query, *attended, *gate_up, *gated, *quantized;
};

static void norm(const struct run *run, inputs x, inputs residual, floats weight, outputs y, int64_t width) {
    struct penstock_norm n = {.x = x, .residual = residual, .weight = weight, .y = y, .x_stride = width,
                              .residual_stride = width, .total = residual ? run->step->residual : NULL,
                              .rows = run->step->tokens, .width = width, .eps = run->step->layers->eps};
    penstock_norm(run->cpu, &n);
}

/* `number`: the index of the projection among those that LoRA adapters may change; -1: it is not one of them. */
static int project(const struct run *run, const struct penstock_projection *p, int number, inputs x, outputs y,
                   outputs scratch) {
    const struct penstock_step *s = run->step;
    struct penstock_product product = {.x = x, .scratch = scratch, .y = y, .parts = p->parts,
                                       .num_parts = p->num_parts, .x_stride = p->depth, .rows = s->tokens,
                                       .depth = p->depth, .width = p->width};
    int failed = penstock_product(run->cpu, &product);
    struct penstock_adapt adapt = {.x = x, .y = y, .runs = s->runs, .x_stride = p->depth, .y_stride = p->width,
                                   .depth = p->depth, .num_runs = s->num_runs, .product = number};
    if (s->num_runs && number >= 0) failed |= penstock_adapt(run->cpu, &adapt);
    return failed;
}

/* Compute `attended` from `heads`. */
static int run_attention(const struct run *run, const struct penstock_layer *l, const struct memory *at) {
    const struct penstock_step *step = run->step;
    const struct penstock_layers *s = step->layers;
    int64_t size = run->cpu->is_bfloat16 ? 2 : 4, wide = l->qkv.width;
    int64_t q_width = (int64_t)s->q_heads * s->head_dim, kv_width = (int64_t)s->kv_heads * s->head_dim;
    const char *gates = at->heads + q_width * size, *key = s->has_gate ? gates + q_width * size : gates;
    struct penstock_rope rope = {
        .q = at->heads, .k = key, .v = key + kv_width * size, .cos = l->cos, .sin = l->sin,
        .positions = step->positions, .kv_slots = step->kv_slots[l->group], .q_weight = l->q_norm,
        .k_weight = l->k_norm, .q_out = at->query, .k_pages = l->k_pages, .v_pages = l->v_pages, .q_stride = wide,
        .k_stride = wide, .v_stride = wide, .page_stride = s->page_stride, .slot_stride = s->slot_stride,
        .tokens = step->tokens, .q_heads = s->q_heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
        .half = l->half, .page_size = s->page_size, .eps = s->eps};
    penstock_rope(run->cpu, &rope);
    struct penstock_attention attention = {
        .q = at->query, .k_pages = l->k_pages, .v_pages = l->v_pages, .out = at->attended,
        .query_starts = step->query_starts, .context_lens = step->context_lens,
        .block_tables = step->block_tables[l->group], .sinks = l->sinks, .q_stride = q_width,
        .page_stride = s->page_stride, .slot_stride = s->slot_stride, .table_stride = step->table_stride,
        .rows = step->rows, .q_heads = s->q_heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
        .page_size = s->page_size, .window = l->window, .scale = s->scale, .cap = s->cap};
    int failed = penstock_attention(run->cpu, &attention);
    struct penstock_gate gate = {.gate = gates, .up = at->attended, .out = at->attended, .gate_stride = wide,
                                 .up_stride = q_width, .rows = step->tokens, .width = q_width, .activation = SIGMOID};
    if (s->has_gate) penstock_gate(run->cpu, &gate);
    return failed;
}

/* Compute `attended` from `hidden` and `heads` in a recurrent layer. */
static int run_recurrent(const struct run *run, const struct penstock_layer *l, const struct memory *at) {
    int64_t channels = channels_of(l), size = run->cpu->is_bfloat16 ? 2 : 4;
    struct penstock_states states = *run->step->states;
    states.base = l->states, states.first_unit = l->first_unit;
    struct penstock_convolution convolution = {
        .states = &states, .x = at->heads, .weight = l->taps, .y = at->query, .x_stride = l->qkv.width,
        .channels = channels, .taps = l->num_taps, .has_silu = 1};
    struct penstock_delta delta = *l->delta;
    delta.states = &states;
    delta.qkv = at->query, delta.qkv_stride = channels;
    delta.z = at->heads + channels * size, delta.z_stride = l->qkv.width;
    delta.gates = at->gated, delta.gates_stride = l->gates.width;
    delta.out = at->attended;
    int failed = project(run, &l->gates, -1, at->hidden, at->gated, at->quantized);
    penstock_convolve(run->cpu, &convolution);
    penstock_delta_rule(run->cpu, &delta);
    return failed;
}

static int run_layer(const struct run *run, const struct penstock_layer *l, const struct memory *at, int is_first) {
    const struct penstock_step *s = run->step;
    int64_t width = l->output.width, wide = l->gate_up.width, half = wide / 2;
    if (is_first) norm(run, s->residual, NULL, l->input_norm, at->hidden, width);
    else norm(run, s->update, s->residual, l->input_norm, at->hidden, width);
    int failed = project(run, &l->qkv, l->delta ? -1 : l->product, at->hidden, at->heads, at->quantized);
    failed |= l->delta ? run_recurrent(run, l, at) : run_attention(run, l, at);
    failed |= project(run, &l->output, l->product + 1, at->attended, s->update, at->quantized);
    if (l->attention_norm) norm(run, s->update, NULL, l->attention_norm, s->update, width);
    norm(run, s->update, s->residual, l->mlp_norm, at->hidden, width);
    failed |= project(run, &l->gate_up, l->product + 2, at->hidden, at->gate_up, at->quantized);
    struct penstock_gate gate = {
        .gate = at->gate_up, .up = at->gate_up + half * (run->cpu->is_bfloat16 ? 2 : 4), .out = at->gated,
        .gate_stride = wide, .up_stride = wide, .rows = s->tokens, .width = half, .activation = s->layers->activation};
    penstock_gate(run->cpu, &gate);
    failed |= project(run, &l->down, l->product + 3, at->gated, s->update, at->quantized);
    if (l->output_norm) norm(run, s->update, NULL, l->output_norm, s->update, width);
    return failed;
}

static void run_layers(void *data) {
    struct run *run = data;
    const struct penstock_layers *layers = run->step->layers;
    struct buffers r = sizes_of(run->cpu, layers, run->step->tokens);
    struct memory at = {.hidden = run->step->scratch};
    at.heads = at.hidden + r.hidden, at.query = at.heads + r.heads, at.attended = at.query + r.query;
    at.gate_up = at.attended + r.attended, at.gated = at.gate_up + r.gate_up, at.quantized = at.gated + r.gated;
    for (int i = 0; i < layers->num && !run->failed; i++) run->failed = run_layer(run, &layers->layers[i], &at, i == 0);
}

int penstock_run_layers(const struct penstock_cpu *cpu, const struct penstock_step *step) {
    struct run run = {.cpu = cpu, .step = step};
    with_team(run_layers, &run, cpu->num_threads);
    return run.failed;
}
