/* LoRA adapters for the rows of a linear layer, divided among threads (cpu_low_rank.h computes the rows). */
#include <stdint.h>

#include "cpu_level.h"
#include "cpu_ops.cdef.h"
#include "cpu_threads.h"

#define ROWS_AT_ONCE 4

struct low_rank_work {
    const struct cpu_level *level;
    const struct penstock_run *runs;
    struct low_rank given;
    int type, num_runs, product;
};

/* Compute items [first, end); an item is ROWS_AT_ONCE rows of one run. */
static void low_rank_some(const void *work, int64_t first, int64_t end, int thread) {
    const struct low_rank_work *w = work;
    int64_t before = 0;
    for (int i = 0; i < w->num_runs && before < end; i++) {
        const struct penstock_run *run = &w->runs[i];
        int64_t items = (run->count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        int64_t from = first > before ? first - before : 0, to = end - before < items ? end - before : items;
        before += items;
        if (from >= to) continue;
        struct low_rank given = w->given;
        given.adapter = run->adapters + w->product;
        int64_t last = to * ROWS_AT_ONCE < run->count ? to * ROWS_AT_ONCE : run->count;
        w->level->low_rank[w->type](&given, run->first + from * ROWS_AT_ONCE, run->first + last);
    }
}

void penstock_adapt(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride,
                    int64_t depth, int num_runs, const struct penstock_run *runs, int product) {
    int64_t items = 0, cost = 0;
    for (int i = 0; i < num_runs; i++) {
        items += (runs[i].count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        cost += (runs[i].count + 10) * runs[i].adapters[product].num_weights;
    }
    if (!cost) return;
    struct low_rank_work w = {level_of(cpu), runs,
                              {.x = (const void *)x, .y = (void *)y, .x_stride = x_stride, .y_stride = y_stride,
                               .depth = depth},
                              cpu->is_bfloat16, num_runs, product};
    int num_threads = threads_for(cost, cpu);
    spread(low_rank_some, &w, items, items / (8 * num_threads) + 1, num_threads);
}
