/* Parallel loops on torch's threads. Private to csrc. */
#ifndef PENSTOCK_CPU_THREADS_H
#define PENSTOCK_CPU_THREADS_H

#include <stdint.h>

/* Process items [first, end). `thread` is less than the number of threads and unique among the running ones. */
typedef void range_function(const void *work, int64_t first, int64_t end, int thread);

/* Distribute items 0 … count-1 over the threads, `chunk` at a time. */
void parallel_for(range_function *function, const void *work, int64_t count, int64_t chunk, int num_threads);

/* Call a function while the team spins, so that jobs it spreads start at once. */
void with_team(void (*function)(void *), void *data, int num_threads);
int has_session(void); /* whether the caller runs within with_team */

#endif
