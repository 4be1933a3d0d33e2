/* The entry points of the recurrent layers: threads share rows and heads, or rows and blocks of channels. */
#include <stddef.h>
#include <stdint.h>

#include "cpu_level.h"
#include "cpu_ops.cdef.h"
#include "cpu_recurrent.cdef.h"
#include "cpu_threads.h"

#define CHANNELS 256 /* channels per block: four of its inputs and the weights fit into the L1 cache */

struct convolve_work {
    const struct cpu_level *level;
    int type, blocks;
    struct convolve convolve;
};

static void convolve_items(const void *work, int64_t first, int64_t end, int thread) {
    const struct convolve_work *w = work;
    for (int64_t i = first; i < end; i++) {
        int64_t channel = i % w->blocks * CHANNELS, last = channel + CHANNELS;
        if (last > w->convolve.channels) last = w->convolve.channels;
        w->level->convolve[w->type](&w->convolve, (int)(i / w->blocks), channel, last);
    }
}

static int64_t tokens_of(const struct penstock_states *states) {
    return ((const int32_t *)states->query_starts)[states->rows];
}

void penstock_convolve(const struct penstock_cpu *cpu, const struct penstock_states *states, uintptr_t x,
                       int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t channels, int taps,
                       int has_silu) {
    struct convolve_work w = {level_of(cpu), cpu->is_bfloat16, (int)((channels + CHANNELS - 1) / CHANNELS),
                              {.states = states, .x = (const void *)x, .weight = (const float *)weight,
                               .bias = (const float *)bias, .y = (void *)y, .x_stride = x_stride,
                               .channels = channels, .taps = taps, .has_silu = has_silu}};
    int num_threads = threads_for(tokens_of(states) * channels * taps * 4, cpu);
    parallel_for(convolve_items, &w, (int64_t)states->rows * w.blocks, 1, num_threads);
}

struct delta_work {
    const struct cpu_level *level;
    int type;
    const struct penstock_delta *delta;
    const struct penstock_states *states;
};

static void delta_items(const void *work, int64_t first, int64_t end, int thread) {
    const struct delta_work *w = work;
    int heads = w->delta->value_heads;
    for (int64_t i = first; i < end; i++)
        w->level->delta[w->type](w->delta, w->states, (int)(i / heads), (int)(i % heads));
}

void penstock_delta_rule(const struct penstock_cpu *cpu, const struct penstock_states *states,
                         const struct penstock_delta *delta) {
    struct delta_work w = {level_of(cpu), cpu->is_bfloat16, delta, states};
    int64_t heads = delta->value_heads, cost = tokens_of(states) * heads * delta->key_dim * delta->value_dim * 4;
    parallel_for(delta_items, &w, states->rows * heads, 1, threads_for(cost, cpu));
}
