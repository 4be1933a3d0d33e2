/* Parallel loops on torch's OpenMP threads.
 *
 * A second OpenMP runtime would create a second team of threads, and two spinning teams compete for the same cores. So
 * this file links no runtime: it looks up GOMP_parallel, the function that compilers generate calls to, in the runtime
 * that the process has loaded (torch loads its libgomp or libiomp with global visibility), and thus runs on the same
 * threads as torch's operators. Without that symbol, the calling thread does all work. */
#define _GNU_SOURCE
#include "cpu_threads.h"

#include <stdatomic.h>
#include <stddef.h>
#if !defined(_WIN32)
#include <dlfcn.h>
#include <sched.h>
#endif

#include "addresses.h"
#include "cpu_ops.cdef.h"

typedef void gomp_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags);

static gomp_parallel *find_team(void) {
    static _Atomic(gomp_parallel *) found; /* looked up until found: torch may be loaded later */
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

struct parallel_loop {
    range_function *function;
    const void *work;
    int64_t count, chunk;
    _Atomic int64_t next;
    atomic_int threads;
};

static void run_chunks(void *data) {
    struct parallel_loop *s = data;
    int thread = atomic_fetch_add_explicit(&s->threads, 1, memory_order_relaxed);
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&s->next, s->chunk, memory_order_relaxed);
        if (first >= s->count) return;
        s->function(s->work, first, first + s->chunk < s->count ? first + s->chunk : s->count, thread);
    }
}

/* A session in which a team runs several jobs. Its thread 0 runs a function that starts one job after the other; the
 * other threads spin until there is one. A job does not wait for threads that have not joined it: the others do their
 * work, so a core that is busy elsewhere delays a job by at most one chunk. */
struct session {
    void (*function)(void *);
    void *data;
    struct parallel_loop *job;
    atomic_uint number;  /* odd while threads can join the job */
    atomic_int num_inside; /* threads at work besides thread 0 */
    atomic_int has_ended;
};

static _Thread_local struct session *session; /* set in thread 0 of a session */

static void spin_wait(unsigned turns) {
#if !defined(_WIN32)
    if (turns % 1024 == 1023) sched_yield();
#endif
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void join_session(void *data) {
    struct session *s = data;
    if (session == s) {
        s->function(s->data);
        atomic_store(&s->has_ended, 1);
        return;
    }
    unsigned done = 0;
    for (unsigned turns = 0; !atomic_load_explicit(&s->has_ended, memory_order_acquire); turns++) {
        unsigned number = atomic_load(&s->number);
        if (number % 2 == 0 || number == done) {
            spin_wait(turns);
            continue;
        }
        atomic_fetch_add(&s->num_inside, 1); /* keeps the job alive, unless it was closed before */
        if (atomic_load(&s->number) == number) run_chunks(s->job);
        atomic_fetch_sub(&s->num_inside, 1);
        done = number;
        turns = 0;
    }
}

void with_team(void (*function)(void *), void *data, int num_threads) {
    gomp_parallel *team = num_threads > 1 && !session ? find_team() : NULL;
    struct session s = {.function = function, .data = data};
    if (!team) {
        function(data);
        return;
    }
    session = &s;
    team(join_session, &s, (unsigned)num_threads, 0);
    session = NULL;
}

int has_session(void) { return session != NULL; }

void parallel_for(range_function *function, const void *work, int64_t count, int64_t chunk, int num_threads) {
    struct parallel_loop s = {.function = function, .work = work, .count = count, .chunk = chunk};
    int is_shared = num_threads > 1 && count > chunk;
    gomp_parallel *team = is_shared && !session ? find_team() : NULL;
    if (is_shared && session) {
        session->job = &s;
        atomic_fetch_add(&session->number, 1);
        run_chunks(&s);
        atomic_fetch_add(&session->number, 1);
        for (unsigned turns = 0; atomic_load(&session->num_inside); turns++) spin_wait(turns);
    } else if (team) team(run_chunks, &s, (unsigned)num_threads, 0);
    else if (count) function(work, 0, count, 0);
}
