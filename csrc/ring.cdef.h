/* The ring's shared words, its waiting and its copies (executor/ring/queue.py, which draws the layout and keeps the order of
 * calls). Linux only: elsewhere penstock_ring_wait sleeps in short naps. Addresses are integers. */

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

/* What lies at the beginning of a slot. */
struct penstock_ring_header {
    uint64_t number;        /* of the message, from 1 */
    uint64_t area;          /* where head and buffers lie; 0: behind this header, else 1 + spill */
    uint64_t body_bytes;    /* of the pickle */
    uint64_t num_buffers;   /* as many lengths of 8 bytes come before it; together they are the head */
    uint64_t buffers_bytes; /* each buffer padded to a multiple of 64 */
    uint64_t head_sum, buffers_sum;
    uint64_t sum; /* of all this */
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

/* Copy `size` bytes and zeros up to the next multiple of 64, adding them to the sum of 16 words, which starts as zeros.
 * The same bytes in other pieces have the same sum, as long as every piece but the last is a multiple of 64. */
void penstock_ring_put(uintptr_t to, const uint8_t *from, size_t size, uint64_t *sum);
uint64_t penstock_ring_digest(const uint64_t *sum);

/* The digest of `size` bytes, a multiple of 64, while they are copied to `to`; 0: not copied. */
uint64_t penstock_ring_take(uintptr_t to, uintptr_t from, size_t size);

/* Store a message's header with its sum. */
void penstock_ring_seal(uintptr_t at, struct penstock_ring_header *header);

/* Write a message whose head is in one piece and which has no buffers: busy, head, header. Not posted yet. */
void penstock_ring_write(uintptr_t lines, int owner, uintptr_t at, uintptr_t start, uint64_t number, uint64_t area,
                         const uint8_t *head, size_t size);

/* Begin to read the message at `at`: busy, and its header copied out. 0: it is message `number`, and its head is as it
 * was written; 1: the header was changed; 2: the head was. A message takes at most `slot_bytes` behind its header, or
 * `spill_bytes` in a spill; spills lie one behind the other from `spills` on. */
int penstock_ring_open(uintptr_t lines, int owner, uintptr_t at, uint64_t number, size_t slot_bytes, uintptr_t spills,
                       int num_spills, size_t spill_bytes, struct penstock_ring_header *header);
