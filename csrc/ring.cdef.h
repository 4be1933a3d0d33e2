/* The ring's shared words and its waiting (executor/ring/queue.py, which draws the layout and keeps the order of calls).
 * Linux only: elsewhere penstock_ring_wait sleeps in short naps. Addresses are integers. */

/* One cache line in shared memory: the writer's, the one where the writer waits for room, and one per reader. */
struct penstock_ring_line {
    uint64_t count;    /* messages published by the writer, or finished by a reader; only its owner stores it */
    uint64_t busy;     /* the message, from 1, that the owner is at; 0: none. For error messages alone */
    uint32_t bell;     /* what sleepers sleep on */
    uint32_t sleepers; /* how many might; too high after a crash, which costs a system call per message */
    uint32_t state;    /* of the owner, see executor/ring/memory_segment.py */
    uint32_t pid;
    uint64_t start;    /* when the process started: a process id alone may be given out again */
    uint64_t unused[3];
};

/* Store `count` into line `owner`, after everything stored before, and wake what sleeps on `bell`. No longer busy. */
void penstock_ring_post(uintptr_t lines, int owner, int bell, uint64_t count);
uint64_t penstock_ring_count(uintptr_t lines, int owner);

/* Until `number` lines from `first` on count at least `target`: spin, then sleep on `bell`. 0: they do, 1: they do and
 * it had to sleep, -1: not in this time, or cancelled, or a signal came. Spinning yields the core to other threads. */
int penstock_ring_wait(uintptr_t lines, int bell, int first, int number, uint64_t target, uint64_t spin_ns,
                       uint64_t sleep_ns, const int *cancelled);
void penstock_ring_wake(uintptr_t lines, int bell);

/* Change a line's state if it is `from`; returns what it was. */
uint32_t penstock_ring_change(uintptr_t lines, int owner, uint32_t from, uint32_t to);
