/* The memory ordering and waiting of the ring. The writer stores a message's bytes plainly, then `count` with
 * sequential consistency; a reader loads `count` before it loads bytes. This release and acquire is correct on ARM too,
 * where plain Python stores would only be correct on x86. Sleeping requires sequential consistency: the sleeper stores
 * `sleepers` and then loads `count`, the sender stores `count` and then loads `sleepers`, and at least one of the two
 * must see the other's store. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "ring.cdef.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

typedef struct penstock_ring_line line;
_Static_assert(sizeof(line) == 64, "lines are cache lines");

enum { SPINS = 16 };

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The futex is shared between processes, so FUTEX_PRIVATE_FLAG is not set. */
static void sleep_on(uint32_t *bell, uint32_t seen, uint64_t ns) {
    struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
#if defined(__linux__)
    syscall(SYS_futex, bell, FUTEX_WAIT, seen, &limit, NULL, 0);
#else
    struct timespec nap = {0, 200000};
    (void)limit, (void)bell, (void)seen;
    nanosleep(&nap, NULL);
#endif
}

void penstock_ring_wake(uintptr_t lines, int bell) {
    line *at = (line *)lines + bell;
    __atomic_fetch_add(&at->bell, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    syscall(SYS_futex, &at->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

void penstock_ring_post(uintptr_t lines, int owner, int bell, uint64_t count) {
    line *all = (line *)lines;
    __atomic_store_n(&all[owner].busy, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&all[owner].count, count, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&all[bell].sleepers, __ATOMIC_SEQ_CST)) penstock_ring_wake(lines, bell);
}

uint64_t penstock_ring_count(uintptr_t lines, int owner) { return load(&((line *)lines)[owner].count); }

uint32_t penstock_ring_change(uintptr_t lines, int owner, uint32_t from, uint32_t to) {
    uint32_t was = from;
    __atomic_compare_exchange_n(&((line *)lines)[owner].state, &was, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return was;
}

static int enough(const line *from, int number, uint64_t target) {
    for (int i = 0; i < number; i++)
        if (load(&from[i].count) < target) return 0;
    return 1;
}

static int is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }

int penstock_ring_wait(uintptr_t lines, int bell, int first, int number, uint64_t target, uint64_t spin_ns,
                       uint64_t sleep_ns, const int *cancelled) {
    line *from = (line *)lines + first, *on = (line *)lines + bell;
    if (enough(from, number, target)) return 0;
    uint64_t start = now_ns();
    while (now_ns() - start < spin_ns && !is_set(cancelled)) {
        for (int i = 0; i < SPINS; i++) {
            if (enough(from, number, target)) return 0;
            pause_core();
        }
        sched_yield(); /* on a busy machine the awaited process may need this core */
    }
    int there = 0;
    __atomic_fetch_add(&on->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&on->bell, __ATOMIC_SEQ_CST);
    if (!(there = enough(from, number, target)) && !is_set(cancelled) && sleep_ns) sleep_on(&on->bell, seen, sleep_ns);
    __atomic_fetch_sub(&on->sleepers, 1, __ATOMIC_SEQ_CST);
    return there || enough(from, number, target) ? 1 : -1;
}
