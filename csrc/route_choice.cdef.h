/* The choice of a replica (router/placement/load.py, router/placement/knowledge.py): the columns of a fleet, one value per replica. */

/* Whose memory is Python's. Where a column's meaning is not plain, router/placement/load.py has it. */
struct penstock_fleet {
    size_t num_rows, num_in_use; /* rows of replicas that have left are shut, and not in use */
    double total_capacity;
    double *queued, *waiting, *head, *head_since, *active, *held;
    double *capacity, *speed, *delay, *filled, *per_capacity, *is_open;
    double *cached;                            /* of the prompt that is asked about: tokens that need not be computed there */
    double *backlog, *ttft, *score;            /* filled by the choice; a score of infinity may not be chosen */
    double wear, affinity_s;                   /* PolicyConfig */
    int policy;                                /* its place in POLICIES */
    int64_t turn;                              /* round robin: who was last */
    uint64_t random;                           /* draws lots; not 0 */
};

/* The row for a request of `num_tokens`, -1 if none is open. `sticky`: the row of its session, or -1. */
int64_t penstock_fleet_choose(struct penstock_fleet *fleet, double num_tokens, double now_s, int64_t sticky,
                              const int64_t *excluded, size_t num_excluded);

/* The life of a request at `row`: it comes, with `own` tokens to be computed and `held` to be kept; its first token comes,
 * and `next` are the own tokens of the request that waits longest now; it goes. */
void penstock_fleet_place(struct penstock_fleet *fleet, size_t row, double own, double held, double now_s);
void penstock_fleet_answer(struct penstock_fleet *fleet, size_t row, double own, double next, double now_s);
void penstock_fleet_leave(struct penstock_fleet *fleet, size_t row, double held);

/* Per row, the slots of its tiers in the index: device, host, disk, and the older generation of a guess. */
struct penstock_slots {
    const int64_t *device, *host, *disk, *older;
    double host_credit, disk_credit;
};

/* cached[row] = tokens, by how many leading blocks each slot holds; rows of another key space than `space` are left
 * alone. `num_deep`: how many rows have anything beneath the device. */
void penstock_cached_tokens(const struct penstock_slots *slots, const int32_t *counts, double block_size,
                            const int64_t *space_of_row, int64_t space, size_t num_deep, size_t num_rows,
                            double *cached);
