/* The choice of a replica. docs/router.md explains the formulas; tests/router/test_choice.py has them in numpy, and
 * both must agree. They are in C because a dozen numpy operations on arrays of eight take 50 µs and this takes 0.1 µs.
 * Only the event loop's thread calls these functions. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "route_choice.cdef.h"

enum { PREDICTED_TTFT, LEAST_LOADED, ROUND_ROBIN };
static const double tie = 1e-6;

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

static uint64_t draw(struct penstock_fleet *fleet) { /* xorshift64* */
    fleet->random ^= fleet->random >> 12;
    fleet->random ^= fleet->random << 25;
    fleet->random ^= fleet->random >> 27;
    return fleet->random * 0x2545f4914f6cdd1d >> 32;
}

static double mean_crowding(const struct penstock_fleet *fleet) {
    double total = 0;
    for (size_t row = 0; row < fleet->num_rows; row++) total += fleet->filled[row] * fleet->per_capacity[row];
    return total / (double)fleet->num_in_use;
}

/* Predict each replica's time to first token, and its score: the same plus a wear penalty for crowded caches. */
static void predict(struct penstock_fleet *fleet, double num_tokens, double now_s) {
    double mean = mean_crowding(fleet);
    for (size_t row = 0; row < fleet->num_rows; row++) {
        double speed = fleet->speed[row], own = num_tokens - fleet->cached[row];
        double done = smaller((now_s - fleet->head_since[row]) * speed, fleet->head[row]);
        double overflow = larger(fleet->held[row] + num_tokens - fleet->capacity[row], 0);
        double crowding = mean > 0 ? fleet->filled[row] * fleet->per_capacity[row] / mean : 0;
        fleet->backlog[row] = fleet->queued[row] - larger(done, 0);
        fleet->ttft[row] = (fleet->backlog[row] + own + overflow) / speed + fleet->delay[row] * fleet->active[row];
        fleet->score[row] = fleet->ttft[row] + fleet->wear * crowding * own / speed;
    }
}

static int64_t next_in_turn(struct penstock_fleet *fleet) {
    int64_t first = -1;
    for (int64_t row = (int64_t)fleet->num_rows - 1; row >= 0; row--)
        if (fleet->score[row] != INFINITY && (first < 0 || first <= fleet->turn || row > fleet->turn)) first = row;
    if (first >= 0) fleet->turn = first;
    return first;
}

/* Return the row with the lowest score, chosen at random among equals. */
static int64_t best(struct penstock_fleet *fleet) {
    double lowest = INFINITY;
    for (size_t row = 0; row < fleet->num_rows; row++) lowest = smaller(lowest, fleet->score[row]);
    if (lowest == INFINITY) return -1;
    uint64_t num_equal = 0;
    for (size_t row = 0; row < fleet->num_rows; row++) num_equal += fleet->score[row] <= lowest + tie;
    uint64_t lot = num_equal > 1 ? draw(fleet) % num_equal : 0;
    for (size_t row = 0;; row++)
        if (fleet->score[row] <= lowest + tie && lot-- == 0) return (int64_t)row;
}

int64_t penstock_fleet_choose(struct penstock_fleet *fleet, double num_tokens, double now_s, int64_t sticky,
                              const int64_t *excluded, size_t num_excluded) {
    double most = larger(num_tokens - 1, 0); /* the last token is always computed */
    for (size_t row = 0; row < fleet->num_rows; row++) fleet->cached[row] = smaller(fleet->cached[row], most);
    predict(fleet, num_tokens, now_s);
    for (size_t row = 0; row < fleet->num_rows; row++)
        if (fleet->is_open[row] == 0) fleet->score[row] = INFINITY;
    for (size_t i = 0; i < num_excluded; i++) fleet->score[excluded[i]] = INFINITY;
    if (fleet->policy == ROUND_ROBIN) return next_in_turn(fleet);
    if (fleet->policy == LEAST_LOADED)
        for (size_t row = 0; row < fleet->num_rows; row++)
            if (fleet->score[row] != INFINITY) fleet->score[row] = fleet->active[row];
    int64_t row = best(fleet);
    if (fleet->policy == PREDICTED_TTFT && row >= 0 && sticky >= 0 &&
        fleet->score[sticky] <= fleet->score[row] + fleet->affinity_s)
        return sticky;
    return row;
}

void penstock_fleet_new_head(struct penstock_fleet *fleet, size_t row, double own, double now_s) {
    fleet->head[row] = own;
    fleet->head_since[row] = now_s;
}

void penstock_fleet_place(struct penstock_fleet *fleet, size_t row, double own, double held, double now_s) {
    if (fleet->waiting[row]++ == 0) penstock_fleet_new_head(fleet, row, own, now_s);
    fleet->active[row] += 1;
    fleet->queued[row] += own;
    fleet->held[row] += held;
    /* `filled` decays over about as many tokens as the fleet's caches hold together. */
    double kept = larger(1 - own / fleet->total_capacity, 0);
    for (size_t each = 0; each < fleet->num_rows; each++) fleet->filled[each] *= kept;
    fleet->filled[row] += own;
}

void penstock_fleet_answer(struct penstock_fleet *fleet, size_t row, double own) {
    fleet->waiting[row] -= 1;
    fleet->queued[row] -= own;
}

void penstock_fleet_leave(struct penstock_fleet *fleet, size_t row, double held) {
    fleet->active[row] -= 1;
    fleet->held[row] -= held;
}

void penstock_cached_tokens(const struct penstock_slots *slots, const int32_t *counts, double block_size,
                            const int64_t *space_of_row, int64_t space, size_t num_rows, double *cached) {
    for (size_t row = 0; row < num_rows; row++) {
        if (space_of_row[row] != space) continue;
        int32_t device = counts[slots->device[row]], older = counts[slots->older[row]];
        double reach = device > older ? device : older, blocks = reach;
        double host = counts[slots->host[row]], disk = counts[slots->disk[row]]; /* what only these hold counts in part */
        blocks += slots->host_credit * larger(host - reach, 0);
        reach = larger(reach, host);
        blocks += slots->disk_credit * larger(disk - reach, 0);
        cached[row] = blocks * block_size;
    }
}
