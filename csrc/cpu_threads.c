/* Work on several threads, borrowed from torch.
 *
 * A second OpenMP runtime would bring a second team, and two teams that wait by spinning fight for the same cores.
 * So this file links none: it looks up GOMP_parallel, the entry that compilers generate calls to, in whatever
 * runtime the process already has (torch loads its libgomp or libiomp with global visibility), and thereby runs on
 * the very threads that torch's own operators use. Without that symbol all work is done by the calling thread. */
#define _GNU_SOURCE
#include "cpu_threads.h"

#include <stdatomic.h>
#include <stddef.h>
#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include "cpu_ops.cdef.h"

typedef void gomp_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags);

static gomp_parallel *find_team(void) {
    static _Atomic(gomp_parallel *) found; /* looked up again while there is none: torch may come later */
    gomp_parallel *team = atomic_load_explicit(&found, memory_order_relaxed);
#if !defined(_WIN32)
    if (!team) {
        void *symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        __builtin_memcpy(&team, &symbol, sizeof team); /* ISO C has no cast from object to function pointer */
        atomic_store_explicit(&found, team, memory_order_relaxed);
    }
#endif
    return team;
}

int penstock_cpu_has_team(void) { return find_team() != NULL; }

struct shared {
    work_on *function;
    const void *work;
    int64_t count, chunk;
    _Atomic int64_t next;
    atomic_int threads;
};

static void take_chunks(void *data) {
    struct shared *s = data;
    int thread = atomic_fetch_add_explicit(&s->threads, 1, memory_order_relaxed);
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&s->next, s->chunk, memory_order_relaxed);
        if (first >= s->count) return;
        s->function(s->work, first, first + s->chunk < s->count ? first + s->chunk : s->count, thread);
    }
}

void spread(work_on *function, const void *work, int64_t count, int64_t chunk, int num_threads) {
    gomp_parallel *team = num_threads > 1 && count > chunk ? find_team() : NULL;
    struct shared s = {.function = function, .work = work, .count = count, .chunk = chunk};
    if (team) team(take_chunks, &s, (unsigned)num_threads, 0);
    else if (count) function(work, 0, count, 0);
}
