/* The ring's shared words and its waiting (executor/ring/queue.py describes the layout and defines the order of calls).
 * Futexes need Linux: elsewhere penstock_ring_wait polls with short sleeps. Addresses are integers. */

/* One cache line in shared memory: the writer's, the one on which the writer waits for space, and one per reader. */
struct penstock_ring_line {
    uint64_t count;    /* messages published by the writer, or finished by a reader; only its owner stores it */
    uint64_t busy;     /* number, from 1, of the message that the owner processes; 0: none. For error messages only */
    uint32_t bell;     /* the futex that sleepers wait on */
    uint32_t sleepers; /* upper bound of the sleepers; too high after a crash, which costs a system call per message */
    uint32_t state;    /* the owner's state, see executor/ring/memory_segment.py */
    uint32_t pid;
    uint64_t start;    /* start time of the process: a process id alone may be reused */
    uint64_t unused[3];
};

/* Store `count` into line `owner` after all earlier stores, clear `busy` and wake the sleepers on `bell`. */
void penstock_ring_post(uintptr_t lines, int owner, int bell, uint64_t count);
uint64_t penstock_ring_count(uintptr_t lines, int owner);

/* Wait until `number` lines from `first` on have a count of at least `target`: spin, then sleep on `bell`. Return 0 if
 * they have, 1 if they have after sleeping, -1 after a timeout, cancellation or signal. Spinning yields the core to
 * others. */
int penstock_ring_wait(uintptr_t lines, int bell, int first, int number, uint64_t target, uint64_t spin_ns,
                       uint64_t sleep_ns, const int *cancelled);
void penstock_ring_wake(uintptr_t lines, int bell);

/* Change a line's state if it is `from`; return the previous state. */
uint32_t penstock_ring_change(uintptr_t lines, int owner, uint32_t from, uint32_t to);
