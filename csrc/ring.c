/* Memory ordering. A message is bytes stored plainly, then `count` stored with sequential consistency; a reader loads
 * `count` before it loads bytes. That is release and acquire, so it holds on ARM as on x86, where plain Python stores
 * would be right by the strength of the hardware alone. Sequential consistency is what sleeping needs: the sleeper
 * stores `sleepers` and then loads `count`, the sender stores `count` and then loads `sleepers`, and at least one of
 * the two must see the other. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "ring.cdef.h"

#if !defined(_WIN32)
#include <sched.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

typedef struct penstock_ring_line line;
typedef struct penstock_ring_header header;
_Static_assert(sizeof(line) == 64 && sizeof(header) == 64, "lines and headers are cache lines");

enum { STRIPE = 64, WORDS = 8, CHUNK = 32 * 1024, SPINS = 16 }; /* CHUNK: a copy of it stays in the first cache */

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

/* Shared between processes, so without FUTEX_PRIVATE_FLAG. */
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
#if !defined(_WIN32)
        sched_yield(); /* on a busy machine the one we wait for may need this very core */
#endif
    }
    int there = 0;
    __atomic_fetch_add(&on->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&on->bell, __ATOMIC_SEQ_CST);
    if (!(there = enough(from, number, target)) && !is_set(cancelled) && sleep_ns) sleep_on(&on->bell, seen, sleep_ns);
    __atomic_fetch_sub(&on->sleepers, 1, __ATOMIC_SEQ_CST);
    return there || enough(from, number, target) ? 1 : -1;
}

/* The sum: eight lanes of 64 bits and a key for each that moves with every stripe, so the place of a word counts. A
 * word adds the product of its halves to its own lane and itself to the lane beside it: one flipped bit always shows.
 * Written twice, because compilers do not find the instruction that multiplies 32 by 32 bits in four lanes at once. */
#define STEP_OF(i) (0x9e3779b97f4a7c15u * (2 * (uint64_t)(i) + 1))

static void add_portable(const uint8_t *from, size_t size, uint64_t *sum) {
    for (size_t at = 0; at < size; at += STRIPE)
        for (int i = 0; i < WORDS; i++) {
            uint64_t word, keyed;
            memcpy(&word, from + at + 8 * i, 8);
            keyed = word ^ sum[WORDS + i];
            sum[i] += (keyed & 0xffffffffu) * (keyed >> 32);
            sum[i ^ 1] += word;
            sum[WORDS + i] += STEP_OF(i);
        }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void add_avx2(const uint8_t *from, size_t size, uint64_t *sum) {
    __m256i lanes[2], keys[2], steps[2];
    for (int half = 0; half < 2; half++) {
        int i = 4 * half;
        lanes[half] = _mm256_loadu_si256((const __m256i *)(sum + i));
        keys[half] = _mm256_loadu_si256((const __m256i *)(sum + WORDS + i));
        steps[half] = _mm256_set_epi64x((int64_t)STEP_OF(i + 3), (int64_t)STEP_OF(i + 2), (int64_t)STEP_OF(i + 1),
                                        (int64_t)STEP_OF(i));
    }
    for (size_t at = 0; at < size; at += STRIPE)
        for (int half = 0; half < 2; half++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(from + at + 32 * half));
            __m256i keyed = _mm256_xor_si256(words, keys[half]);
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            __m256i swapped = _mm256_shuffle_epi32(words, 0x4e); /* pairs change places */
            lanes[half] = _mm256_add_epi64(lanes[half], _mm256_add_epi64(product, swapped));
            keys[half] = _mm256_add_epi64(keys[half], steps[half]);
        }
    for (int half = 0; half < 2; half++) {
        _mm256_storeu_si256((__m256i *)(sum + 4 * half), lanes[half]);
        _mm256_storeu_si256((__m256i *)(sum + WORDS + 4 * half), keys[half]);
    }
}
#endif

static void add(const uint8_t *from, size_t size, uint64_t *sum) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        add_avx2(from, size, sum);
        return;
    }
#endif
    add_portable(from, size, sum);
}

void penstock_ring_put(uintptr_t to, const uint8_t *from, size_t size, uint64_t *sum) {
    uint8_t *out = (uint8_t *)to;
    size_t whole = size / STRIPE * STRIPE;
    for (size_t at = 0; at < whole; at += CHUNK) {
        size_t part = whole - at < CHUNK ? whole - at : CHUNK;
        memcpy(out + at, from + at, part);
        add(out + at, part, sum);
    }
    if (whole < size) {
        memcpy(out + whole, from + whole, size - whole);
        memset(out + size, 0, whole + STRIPE - size);
        add(out + whole, STRIPE, sum);
    }
}

uint64_t penstock_ring_digest(const uint64_t *sum) {
    uint64_t digest = 0;
    for (int i = 0; i < 2 * WORDS; i++) {
        digest ^= sum[i];
        digest = (digest << 27 | digest >> 37) * 0x9fb21c651e98df25u;
        digest ^= digest >> 32;
    }
    return digest;
}

uint64_t penstock_ring_take(uintptr_t to, uintptr_t from, size_t size) {
    const uint8_t *in = (const uint8_t *)from;
    uint64_t sum[2 * WORDS] = {0};
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t part = size - at < CHUNK ? size - at : CHUNK;
        if (to) memcpy((uint8_t *)to + at, in + at, part);
        add(to ? (const uint8_t *)to + at : in + at, part, sum);
    }
    return penstock_ring_digest(sum);
}

static uint64_t header_sum(const header *from) {
    header bare = *from;
    bare.sum = 0;
    return penstock_ring_take(0, (uintptr_t)&bare, sizeof bare);
}

void penstock_ring_seal(uintptr_t at, header *from) {
    from->sum = header_sum(from);
    memcpy((void *)at, from, sizeof *from);
}

static void set_busy(uintptr_t lines, int owner, uint64_t number) {
    __atomic_store_n(&((line *)lines)[owner].busy, number, __ATOMIC_RELAXED);
}

void penstock_ring_write(uintptr_t lines, int owner, uintptr_t at, uintptr_t start, uint64_t number, uint64_t area,
                         const uint8_t *head, size_t size) {
    uint64_t head_sum[2 * WORDS] = {0}, none[2 * WORDS] = {0};
    set_busy(lines, owner, number);
    penstock_ring_put(start, head, size, head_sum);
    header made = {number, area, size, 0, 0, penstock_ring_digest(head_sum), penstock_ring_digest(none), 0};
    penstock_ring_seal(at, &made);
}

int penstock_ring_open(uintptr_t lines, int owner, uintptr_t at, uint64_t number, size_t slot_bytes, uintptr_t spills,
                       int num_spills, size_t spill_bytes, header *out) {
    set_busy(lines, owner, number);
    memcpy(out, (const void *)at, sizeof *out);
    if (header_sum(out) != out->sum || out->number != number || out->area > (uint64_t)num_spills) return 1;
    size_t limit = out->area ? spill_bytes : slot_bytes;
    if (out->num_buffers > limit / 8 || out->body_bytes > limit || out->buffers_bytes > limit) return 1;
    size_t head = (8 * out->num_buffers + out->body_bytes + STRIPE - 1) / STRIPE * STRIPE;
    if (head + out->buffers_bytes > limit) return 1;
    uintptr_t start = out->area ? spills + (out->area - 1) * spill_bytes : at + sizeof *out;
    return penstock_ring_take(0, start, head) == out->head_sum ? 0 : 2;
}
