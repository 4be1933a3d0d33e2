/* The router's index: maps a key and a group of 64 slots to the bitmask of the slots that hold the block.
 *
 * It has three tables (route_table.h). *Facts* come from the replicas' events. *Predictions* are the router's own, in two
 * generations; each call of `age_predictions` empties the older one, so a prediction lives for one to two intervals between
 * these calls, and no clock is needed here. A flood of requests can only evict predictions, never facts.
 *
 * Memory is bounded: a full table of facts evicts its least recently used entry, a full table of predictions is aged
 * early, and the number of facts per slot has a limit.
 *
 * A retired slot stops matching at once (its bit in `live` is cleared). The calls that change the index sweep the facts
 * in rounds, a limited number of entries each, so that no call walks the whole table: a sweep clears all bits of slots
 * that are not live. If every slot number is taken or not swept yet, `add_slot` sweeps twice and may still fail; the next
 * call continues from there. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "keys.cdef.h"
#include "route_index.cdef.h"
#include "route_table.h"

enum { MAX_SLOTS = 8192, SLOTS_PER_GROUP = 64, MAX_GROUPS = MAX_SLOTS / SLOTS_PER_GROUP, SWEEP_PER_CALL = 4096 };

struct index {
    pthread_mutex_t lock;
    struct table facts, predictions[2]; /* predictions[0] is the younger generation */
    uint64_t seed, num_evicted;
    uint32_t num_slots;             /* all slots ever used are below this */
    uint64_t live[MAX_GROUPS];      /* the slots in use */
    uint64_t at_ends[MAX_GROUPS];   /* slots in which a key implies all keys before it */
    uint64_t limits[MAX_SLOTS], held[MAX_SLOTS];
    uint32_t num_retired;           /* slots that are retired and not reused */
    uint32_t swept;                 /* the last fact that this round of the sweep has visited */
    uint64_t round, last_round;     /* of the sweep: finished rounds; the round after which no retired slot has a bit */
    uint64_t age;                   /* calls of age_predictions */
    uint64_t reusable_round[MAX_SLOTS], reusable_age[MAX_SLOTS]; /* when a retired slot's number can be used again */
};

static void *locked(void *opened) {
    pthread_mutex_lock(&((struct index *)opened)->lock);
    return opened;
}

static void unlock(struct index *index) { pthread_mutex_unlock(&index->lock); }

static uint64_t bit_of(uint32_t slot) { return 1ull << slot % SLOTS_PER_GROUP; }

static int is_live(const struct index *index, uint32_t slot) {
    return slot < index->num_slots && index->live[slot / SLOTS_PER_GROUP] & bit_of(slot);
}

static uint32_t num_groups(const struct index *index) {
    return (index->num_slots + SLOTS_PER_GROUP - 1) / SLOTS_PER_GROUP;
}

static void forget_bits(struct index *index, uint32_t group, uint64_t mask) {
    for (; mask; mask &= mask - 1) index->held[group * SLOTS_PER_GROUP + (uint32_t)__builtin_ctzll(mask)]--;
}

static void evict_oldest_fact(struct index *index) {
    uint32_t at = index->facts.oldest;
    forget_bits(index, index->facts.entries[at].group, index->facts.entries[at].mask);
    drop(&index->facts, index->seed, at);
    index->num_evicted++;
}

/* Continue the sweep, until no retired slot has a bit in the facts. */
static void sweep(struct index *index) {
    struct table *facts = &index->facts;
    for (uint32_t i = 0; i < SWEEP_PER_CALL && index->round < index->last_round; i++) {
        if (++index->swept > facts->num_used) {
            index->swept = 0, index->round++;
            continue;
        }
        struct entry *entry = &facts->entries[index->swept];
        if (entry->group == FREE) continue;
        uint64_t gone = entry->mask & ~index->live[entry->group];
        if (!gone) continue;
        forget_bits(index, entry->group, gone);
        entry->mask &= ~gone;
        if (!entry->mask) drop(facts, index->seed, index->swept);
    }
}

static int is_reusable(const struct index *index, uint32_t slot) {
    return !is_live(index, slot) && index->round >= index->reusable_round[slot] &&
           index->age >= index->reusable_age[slot];
}

static int take_slot(struct index *index, uint32_t slot, uint64_t limit, int at_ends) {
    if (slot >= index->num_slots)
        index->num_slots = slot + 1;
    else
        index->num_retired--;
    uint32_t group = slot / SLOTS_PER_GROUP;
    index->live[group] |= bit_of(slot);
    index->at_ends[group] = at_ends ? index->at_ends[group] | bit_of(slot) : index->at_ends[group] & ~bit_of(slot);
    index->limits[slot] = limit;
    return (int)slot;
}

static int find_slot(struct index *index, uint64_t limit, int at_ends) {
    if (index->num_retired)
        for (uint32_t slot = 0; slot < index->num_slots; slot++)
            if (is_reusable(index, slot)) return take_slot(index, slot, limit, at_ends);
    return index->num_slots < MAX_SLOTS ? take_slot(index, index->num_slots, limit, at_ends) : -1;
}

static void age_predictions(struct index *index) {
    struct table older = index->predictions[1];
    index->predictions[1] = index->predictions[0];
    table_empty(&older);
    index->predictions[0] = older;
    index->age++;
}

static inline uint64_t holders(const struct index *index, uint64_t key, uint32_t group) {
    uint64_t mask = 0;
    uint32_t at = find(&index->facts, index->seed, key, group);
    if (at) mask = index->facts.entries[at].mask;
    for (int i = 0; i < 2; i++)
        if (index->predictions[i].num_entries && (at = find(&index->predictions[i], index->seed, key, group)))
            mask |= index->predictions[i].entries[at].mask;
    return mask;
}

static void count(uint64_t mask, int32_t value, int32_t *counts, size_t num_slots) {
    for (; mask; mask &= mask - 1) {
        size_t slot = (size_t)__builtin_ctzll(mask);
        if (slot < num_slots) counts[slot] = value;
    }
}

/* A binary search for the slots of `mask`, which hold at least `low` and at most `high` leading blocks. */
struct range {
    size_t low, high;
    uint64_t mask;
};

/* Count, for each slot of `mask`, the keys up to the last one that it holds. */
static void match_ends(const struct index *index, const uint64_t *keys, size_t num_keys, uint32_t group,
                       uint64_t mask, int32_t *counts, size_t num_slots) {
    for (size_t i = num_keys; i > 0 && mask; i--) {
        if (i > FAR) {
            fetch_bucket(&index->facts, index->seed, keys[i - 1 - FAR], group);
            fetch_entry(&index->facts, index->seed, keys[i - 1 - NEAR], group);
        }
        uint64_t there = holders(index, keys[i - 1], group) & mask;
        count(there, (int32_t)i, counts, num_slots);
        mask &= ~there;
    }
}

static void match_group(const struct index *index, const uint64_t *keys, size_t num_keys, size_t num_ends,
                        uint32_t group, int32_t *counts, size_t num_slots) {
    uint64_t at_ends = index->live[group] & index->at_ends[group];
    match_ends(index, keys, num_ends, group, at_ends, counts, num_slots);
    uint64_t first = holders(index, keys[0], group) & index->live[group] & ~at_ends;
    if (!first) return;
    uint64_t all = holders(index, keys[num_keys - 1], group) & first; /* often the whole prompt */
    count(all, (int32_t)num_keys, counts, num_slots);
    struct range stack[72];
    int depth = 0;
    if (first & ~all) stack[depth++] = (struct range){1, num_keys - 1, first & ~all};
    while (depth) {
        struct range range = stack[--depth];
        if (range.low == range.high) {
            count(range.mask, (int32_t)range.low, counts, num_slots);
            continue;
        }
        size_t middle = range.low + (range.high - range.low + 1) / 2;
        uint64_t there = holders(index, keys[middle - 1], group) & range.mask;
        if (there) stack[depth++] = (struct range){middle, range.high, there};
        if (range.mask & ~there) stack[depth++] = (struct range){range.low, middle - 1, range.mask & ~there};
    }
}

static void match(const struct index *index, const uint64_t *keys, size_t num_keys, size_t num_ends, int32_t *counts,
                  size_t num_slots) {
    memset(counts, 0, num_slots * sizeof *counts);
    for (uint32_t group = 0; num_keys && group < num_groups(index); group++) {
        size_t before = (size_t)group * SLOTS_PER_GROUP;
        if (before >= num_slots) break;
        match_group(index, keys, num_keys, num_ends, group, counts + before, num_slots - before);
    }
}

static inline uint64_t low_64(const uint8_t *key) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value |= (uint64_t)key[i] << 8 * i;
    return value;
}

/* -- functions called by router/placement/index.py ------------------------------------------------------------------ */

void *penstock_route_open(uint32_t capacity, uint32_t num_predictions, uint64_t seed) {
    struct index *index = calloc(1, sizeof *index);
    if (!index) return NULL;
    pthread_mutex_init(&index->lock, NULL);
    index->seed = seed;
    int is_open = table_open(&index->facts, capacity);
    is_open = table_open(&index->predictions[0], num_predictions) && is_open;
    is_open = table_open(&index->predictions[1], num_predictions) && is_open;
    if (is_open) return index;
    penstock_route_close(index);
    return NULL;
}

void penstock_route_close(void *opened) {
    struct index *index = opened;
    table_close(&index->facts);
    table_close(&index->predictions[0]);
    table_close(&index->predictions[1]);
    pthread_mutex_destroy(&index->lock);
    free(index);
}

int penstock_route_add_slot(void *opened, uint64_t limit, int at_ends) {
    struct index *index = locked(opened);
    int slot = find_slot(index, limit, at_ends);
    if (slot < 0 && index->num_retired) { /* every number is taken or not swept yet */
        for (int i = 0; i < 2; i++) { /* the sweep in progress, and one for slots retired since */
            sweep(index);
            age_predictions(index);
        }
        slot = find_slot(index, limit, at_ends);
    }
    unlock(index);
    return slot;
}

void penstock_route_retire_slot(void *opened, uint32_t slot) {
    struct index *index = locked(opened);
    if (is_live(index, slot)) {
        index->live[slot / SLOTS_PER_GROUP] &= ~bit_of(slot);
        index->num_retired++;
        index->last_round = index->round + (index->swept ? 2 : 1); /* one whole round from here on */
        index->reusable_round[slot] = index->last_round;
        index->reusable_age[slot] = index->age + 2; /* then no prediction contains its bit */
    }
    unlock(index);
}

uint64_t penstock_route_store(void *opened, uint32_t slot, const uint8_t *keys, size_t num_keys) {
    struct index *index = locked(opened);
    uint32_t group = slot / SLOTS_PER_GROUP;
    uint64_t bit = bit_of(slot), num_refused = 0;
    sweep(index);
    /* In reverse order, so that a chain's start is its most recently used part and its end is evicted first. */
    for (size_t i = is_live(index, slot) ? num_keys : 0; i-- > 0;) {
        uint64_t key = low_64(keys + 8 * i);
        if (i >= FAR) {
            fetch_bucket(&index->facts, index->seed, low_64(keys + 8 * (i - FAR)), group);
            fetch_entry(&index->facts, index->seed, low_64(keys + 8 * (i - NEAR)), group);
        }
        uint32_t at = find(&index->facts, index->seed, key, group);
        if (at) touch(&index->facts, at);
        if (at && index->facts.entries[at].mask & bit) continue;
        if (index->held[slot] >= index->limits[slot]) {
            num_refused++;
            continue;
        }
        if (!at) {
            if (index->facts.num_entries == index->facts.capacity) evict_oldest_fact(index);
            at = add(&index->facts, index->seed, key, group);
        }
        index->facts.entries[at].mask |= bit;
        index->held[slot]++;
    }
    unlock(index);
    return num_refused;
}

void penstock_route_remove(void *opened, uint32_t slot, const uint8_t *keys, size_t num_keys) {
    struct index *index = locked(opened);
    uint32_t group = slot / SLOTS_PER_GROUP;
    uint64_t bit = bit_of(slot);
    sweep(index);
    for (size_t i = 0; is_live(index, slot) && i < num_keys; i++) {
        uint64_t key = low_64(keys + 8 * i);
        uint32_t at = find(&index->facts, index->seed, key, group);
        if (!at || !(index->facts.entries[at].mask & bit)) continue;
        index->held[slot]--;
        if (!(index->facts.entries[at].mask &= ~bit)) drop(&index->facts, index->seed, at);
    }
    unlock(index);
}

static void predict(struct index *index, uint64_t key, uint32_t group, uint64_t bit) {
    struct table *predictions = &index->predictions[0];
    uint32_t at = find(predictions, index->seed, key, group);
    if (!at) {
        if (predictions->num_entries == predictions->capacity) age_predictions(index); /* a full table is aged early */
        at = add(predictions, index->seed, key, group);
    }
    predictions->entries[at].mask |= bit;
}

void penstock_route_predict(void *opened, uint32_t slot, const uint64_t *keys, size_t num_keys, size_t num_known) {
    struct index *index = locked(opened);
    uint32_t group = slot / SLOTS_PER_GROUP;
    uint64_t bit = bit_of(slot);
    for (size_t i = is_live(index, slot) ? num_keys : 0; i-- > 0;) {
        if (i >= FAR) {
            fetch_bucket(i - FAR < num_known ? &index->facts : index->predictions, index->seed, keys[i - FAR], group);
            fetch_entry(i - NEAR < num_known ? &index->facts : index->predictions, index->seed, keys[i - NEAR], group);
        }
        uint32_t at = i < num_known ? find(&index->facts, index->seed, keys[i], group) : NONE;
        if (at) touch(&index->facts, at); /* mark as recently used */
        if (!at || !(index->facts.entries[at].mask & bit)) predict(index, keys[i], group, bit);
    }
    unlock(index);
}

void penstock_route_age_predictions(void *opened) {
    struct index *index = locked(opened);
    sweep(index);
    age_predictions(index);
    unlock(index);
}

void penstock_route_match(void *opened, const uint64_t *keys, size_t num_keys, size_t num_ends, int32_t *counts,
                          size_t num_slots) {
    struct index *index = locked(opened);
    match(index, keys, num_keys, num_ends, counts, num_slots);
    unlock(index);
}

void penstock_route_keys(const uint8_t *root, const uint8_t *tokens, size_t num_blocks, size_t block_size,
                         uint64_t *keys) {
    /* In batches, so that the 32-byte keys fit on the stack. */
    enum { STRETCH = 64 };
    uint8_t whole[32 * STRETCH], parent[32];
    for (size_t first = 0; first < num_blocks; first += STRETCH) {
        size_t count = num_blocks - first < STRETCH ? num_blocks - first : STRETCH;
        penstock_block_keys(root, tokens + 4 * first * block_size, count, block_size, 0, whole);
        for (size_t i = 0; i < count; i++) keys[first + i] = low_64(whole + 32 * i);
        memcpy(parent, whole + 32 * (count - 1), 32);
        root = parent;
    }
}

uint64_t penstock_route_num_held(void *opened, uint32_t slot) {
    struct index *index = locked(opened);
    uint64_t held = is_live(index, slot) ? index->held[slot] : 0;
    unlock(index);
    return held;
}

void penstock_route_stats(void *opened, uint64_t out[4]) {
    struct index *index = locked(opened);
    out[0] = index->facts.num_entries;
    out[1] = (uint64_t)index->predictions[0].num_entries + index->predictions[1].num_entries;
    out[2] = index->num_evicted;
    out[3] = table_bytes(&index->facts) + 2 * table_bytes(&index->predictions[0]);
    unlock(index);
}

int penstock_route_check(void *opened) {
    struct index *index = locked(opened);
    int sound = table_is_sound(&index->facts, index->seed) && table_is_sound(&index->predictions[0], index->seed) &&
                table_is_sound(&index->predictions[1], index->seed);
    uint64_t *seen = calloc(index->num_slots + 1ull, sizeof *seen);
    for (uint32_t at = index->facts.newest; seen && sound && at; at = index->facts.entries[at].older)
        for (uint64_t mask = index->facts.entries[at].mask; mask; mask &= mask - 1)
            seen[index->facts.entries[at].group * SLOTS_PER_GROUP + (uint32_t)__builtin_ctzll(mask)]++;
    for (uint32_t slot = 0; seen && sound && slot < index->num_slots; slot++)
        sound = seen[slot] == index->held[slot] && seen[slot] <= index->limits[slot];
    sound = sound && seen;
    free(seen);
    unlock(index);
    return sound;
}
