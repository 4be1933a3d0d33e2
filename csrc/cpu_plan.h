/* Attention of a whole batch, cut into jobs for several threads. Private to csrc. */
#ifndef PENSTOCK_CPU_PLAN_H
#define PENSTOCK_CPU_PLAN_H

#include "cpu_level.h"

/* Return 0, or -1 if memory cannot be allocated. */
int attend_batch(const struct cpu_level *level, int type, const struct attention *a, int num_threads);

#endif
