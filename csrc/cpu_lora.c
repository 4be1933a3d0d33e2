/* LoRA adapters of a linear layer: divides the rows among threads (cpu_lora.h computes them). */
#include <stdint.h>

#include "cpu_level.h"
#include "cpu_ops.cdef.h"
#include "cpu_threads.h"

#define ROWS_PER_ITEM 4

struct lora_work {
    const struct cpu_level *level;
    const struct penstock_run *runs;
    struct lora lora;
    int type, num_runs, product;
};

/* Compute items [first, end). An item is ROWS_PER_ITEM rows of one run. */
static void lora_items(const void *work, int64_t first, int64_t end, int thread) {
    const struct lora_work *w = work;
    int64_t before = 0;
    for (int i = 0; i < w->num_runs && before < end; i++) {
        const struct penstock_run *run = &w->runs[i];
        int64_t items = (run->count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
        int64_t from = first > before ? first - before : 0, to = end - before < items ? end - before : items;
        before += items;
        if (from >= to) continue;
        struct lora lora = w->lora;
        lora.adapter = run->adapters + w->product;
        int64_t last = to * ROWS_PER_ITEM < run->count ? to * ROWS_PER_ITEM : run->count;
        w->level->lora[w->type](&lora, run->first + from * ROWS_PER_ITEM, run->first + last);
    }
}

void penstock_adapt(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride,
                    int64_t depth, int num_runs, const struct penstock_run *runs, int product) {
    int64_t items = 0, cost = 0;
    for (int i = 0; i < num_runs; i++) {
        items += (runs[i].count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
        cost += (runs[i].count + 10) * runs[i].adapters[product].num_weights;
    }
    if (!cost) return;
    struct lora_work w = {level_of(cpu), runs,
                          {.x = (const void *)x, .y = (void *)y, .x_stride = x_stride, .y_stride = y_stride,
                           .depth = depth},
                          cpu->is_bfloat16, num_runs, product};
    int num_threads = threads_for(cost, cpu);
    parallel_for(lora_items, &w, items, items / (8 * num_threads) + 1, num_threads);
}
