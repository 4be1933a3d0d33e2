/* Work on several threads: those of torch, not more. Private to csrc. */
#ifndef PENSTOCK_CPU_THREADS_H
#define PENSTOCK_CPU_THREADS_H

#include <stdint.h>

/* Does items [first, end). `thread` is below the number of threads and unique among those at work. */
typedef void work_on(const void *work, int64_t first, int64_t end, int thread);

/* Items 0 … count-1, `chunk` at a time, to whichever thread is free. */
void spread(work_on *function, const void *work, int64_t count, int64_t chunk, int num_threads);

/* Calls a function while the team is there, so that what it hands out is taken at once. */
void with_team(void (*function)(void *), void *data, int num_threads);
int has_session(void); /* whether this is called within such a function */

#endif
