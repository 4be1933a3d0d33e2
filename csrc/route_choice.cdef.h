/* The choice of a replica (router/placement/load.py and cache_map.py): the columns of a fleet, one value per replica. */

/* A fleet; Python owns its memory. router/placement/load.py explains the columns. */
struct penstock_fleet {
    size_t num_rows, num_in_use; /* rows of removed replicas are closed and not in use */
    double total_capacity;
    double *queued, *waiting, *head, *head_since, *active, *held;
    double *capacity, *speed, *delay, *filled, *per_capacity, *is_open;
    double *cached;                            /* tokens of the current prompt that are cached there */
    double *backlog, *ttft, *score;            /* set by the choice; a score of infinity excludes a row */
    double wear, affinity_s;                   /* PolicyConfig */
    int policy;                                /* index in POLICIES */
    int64_t turn;                              /* the last row chosen by round robin */
    uint64_t random;                           /* state of the random generator; not 0 */
};

/* Choose the row for a request of `num_tokens`; -1 if none is open. `sticky`: the row of its session, or -1. */
int64_t penstock_fleet_choose(struct penstock_fleet *fleet, double num_tokens, double now_s, int64_t sticky,
                              const int64_t *excluded, size_t num_excluded);

/* Record the life of a request at `row`: placed, with `own` tokens to compute and `held` to store; answered with its
 * first token; finished. If the request that waited longest no longer waits, also record the next one as the head. */
void penstock_fleet_place(struct penstock_fleet *fleet, size_t row, double own, double held, double now_s);
void penstock_fleet_answer(struct penstock_fleet *fleet, size_t row, double own);
void penstock_fleet_new_head(struct penstock_fleet *fleet, size_t row, double own, double now_s);
void penstock_fleet_leave(struct penstock_fleet *fleet, size_t row, double held);

/* Per row, the index slots of its tiers: device, host, disk, and the older generation of an estimate. */
struct penstock_slots {
    const int64_t *device, *host, *disk, *older;
    double host_credit, disk_credit;
};

/* Set cached[row] to tokens from the number of leading blocks of each slot; rows of another key space than `space` are
 * not changed. */
void penstock_cached_tokens(const struct penstock_slots *slots, const int32_t *counts, double block_size,
                            const int64_t *space_of_row, int64_t space, size_t num_rows, double *cached);
