/* Planning and execution of a batch's attention as jobs that keep all threads busy to the end.
 *
 * The queries of a sequence are divided into runs that share a pass over the keys. If a job is still too large (a
 * decode over a long context), the pass is divided into pieces, which are ranges of tiles (split-KV). The results are
 * stored per tile, and the thread that finishes the last piece merges them, so the result is bitwise independent of the
 * division and of the number of threads (see cpu_attention.h). */
#include <stdatomic.h>
#include <stdlib.h>

#include "cpu_level.h"

#define JOB_ROWS 192 /* queries times heads of a group: enough to amortize the repacking of a tile */

/* The unit of cost is one row of one tile: about 60 ns with 64 dimensions on one core. */
#define TILE_OVERHEAD 8  /* the cost of repacking a tile */
#define LEAST_TO_SHARE 200 /* below this cost, waking the threads costs more than it saves … */
#define LEAST_TO_SHARE_AT_ONCE 20 /* … and below this if the threads are already spinning */
#define JOBS_PER_THREAD 4

struct totals {
    int64_t cost, partial_floats; /* per KV head */
    int num_jobs, most_rows;
};

/* Set the range of tiles that the queries of `job` attend to; return its cost. */
static int64_t find_tiles(const struct penstock_attention *a, struct attention_job *job) {
    int num_queries = a->query_starts[job->row + 1] - a->query_starts[job->row];
    int first = a->context_lens[job->row] - num_queries + job->first_query, end = first + job->num_queries;
    int seen_from = a->window && first >= a->window ? first + 1 - a->window : 0;
    job->first_tile = seen_from / TILE;
    job->num_tiles = end > 0 ? (end + TILE - 1) / TILE - job->first_tile : 0;
    return (int64_t)job->num_tiles * (job->num_queries * (a->q_heads / a->kv_heads) + TILE_OVERHEAD);
}

/* Append `pass` to `jobs` (NULL: only count), divided into pieces that cost about `limit` (0: undivided). */
static void cut_pass(const struct penstock_attention *a, struct attention_job pass, int64_t limit, struct totals *totals,
                     struct attention_job *jobs) {
    int rows = pass.num_queries * (a->q_heads / a->kv_heads), first = totals->num_jobs;
    int64_t cost = find_tiles(a, &pass), num_tiles = pass.num_tiles;
    int64_t num_pieces = limit ? (cost + limit - 1) / limit : 1;
    if (num_pieces > num_tiles) num_pieces = num_tiles;
    if (num_pieces < 1) num_pieces = 1; /* a pass without tiles still writes its zeros */
    for (int64_t i = 0; i < num_pieces; i++) {
        struct attention_job piece = pass;
        piece.first_tile += (int)(num_tiles * i / num_pieces);
        piece.num_tiles = (int)(num_tiles * (i + 1) / num_pieces - num_tiles * i / num_pieces);
        piece.first_piece = first;
        piece.num_pieces = (int)num_pieces;
        piece.partial = num_pieces == 1 ? -1 : totals->partial_floats;
        if (num_pieces > 1) totals->partial_floats += piece.num_tiles * partial_floats(rows, a->head_dim);
        if (jobs) jobs[totals->num_jobs] = piece;
        totals->num_jobs++;
    }
    totals->cost += cost;
    if (rows > totals->most_rows) totals->most_rows = rows;
}

/* Start with the last queries: they attend to most tiles, and smaller jobs at the end balance the threads. */
static struct totals cut_batch(const struct penstock_attention *a, int64_t limit, struct attention_job *jobs) {
    struct totals totals = {0};
    int group = a->q_heads / a->kv_heads, most = group < JOB_ROWS ? JOB_ROWS / group : 1;
    for (int row = 0; row < a->rows; row++)
        for (int left = a->query_starts[row + 1] - a->query_starts[row]; left > 0;) {
            int first = (left - 1) / most * most;
            struct attention_job pass = {.row = row, .first_query = first, .num_queries = left - first};
            cut_pass(a, pass, limit, &totals, jobs);
            left = first;
        }
    return totals;
}

struct batch_work {
    const struct cpu_level *level;
    const struct penstock_attention *attention;
    const struct attention_job *jobs;
    atomic_int *pieces_left; /* [jobs, kv heads], used at a pass's first piece */
    float *partials;         /* [kv heads, partial_floats] */
    char *scratch;           /* [threads, scratch_bytes] */
    int64_t partial_floats, scratch_bytes;
    int type;
};

static void attend_jobs(const void *work, int64_t first, int64_t end, int thread) {
    const struct batch_work *w = work;
    int kv_heads = w->attention->kv_heads;
    char *scratch = w->scratch + thread * w->scratch_bytes;
    for (int64_t i = first; i < end; i++) {
        const struct attention_job *job = &w->jobs[i / kv_heads];
        int kv_head = (int)(i % kv_heads);
        float *partials = w->partials + kv_head * w->partial_floats;
        w->level->attend[w->type](w->attention, job, kv_head, partials, scratch);
        if (job->num_pieces == 1) continue;
        atomic_int *left = &w->pieces_left[(int64_t)job->first_piece * kv_heads + kv_head];
        if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) == 1)
            w->level->combine[w->type](w->attention, &w->jobs[job->first_piece], kv_head, partials, scratch);
    }
}

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int attend_batch(const struct cpu_level *level, const struct penstock_cpu *cpu, const struct penstock_attention *a) {
    int num_threads = cpu->num_threads;
    struct totals totals = cut_batch(a, 0, NULL);
    int64_t limit = 0, cost = totals.cost * a->kv_heads;
    if (cost < (has_session() ? LEAST_TO_SHARE_AT_ONCE : LEAST_TO_SHARE)) num_threads = 1;
    if (num_threads > 1) {
        limit = cost / (num_threads * JOBS_PER_THREAD) + 1;
        totals = cut_batch(a, limit, NULL);
    }
    int64_t count = (int64_t)totals.num_jobs * a->kv_heads;
    if (!count) return 0;

    struct batch_work w = {.level = level, .attention = a, .type = cpu->is_bfloat16,
                           .partial_floats = totals.partial_floats,
                           .scratch_bytes = level->scratch_bytes(a->head_dim, totals.most_rows)};
    int64_t jobs_bytes = aligned(totals.num_jobs * (int64_t)sizeof(struct attention_job));
    int64_t left_bytes = aligned(count * (int64_t)sizeof(atomic_int));
    int64_t partials_bytes = aligned(totals.partial_floats * a->kv_heads * 4);
    char *memory = aligned_alloc(64, jobs_bytes + left_bytes + partials_bytes + num_threads * w.scratch_bytes);
    if (!memory) return -1;
    struct attention_job *jobs = (struct attention_job *)memory;
    cut_batch(a, limit, jobs);
    w.jobs = jobs;
    w.pieces_left = (atomic_int *)(memory + jobs_bytes);
    w.partials = (float *)(memory + jobs_bytes + left_bytes);
    w.scratch = memory + jobs_bytes + left_bytes + partials_bytes;
    for (int64_t i = 0; i < count; i++) atomic_init(&w.pieces_left[i], jobs[i / a->kv_heads].num_pieces);
    parallel_for(attend_jobs, &w, count, 1, num_threads);
    free(memory);
    return 0;
}
