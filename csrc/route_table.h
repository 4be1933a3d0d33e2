/* A table of the router's index: a bounded LRU hash map from (key, group of slots) to bitmask.
 *
 * It consists of a pool of 32-byte entries, hash buckets that chain them, and a list from the most to the least
 * recently used. Memory is reserved at the start; the kernel assigns pages as it fills. Private to route_index.c. */
#ifndef PENSTOCK_ROUTE_TABLE_H
#define PENSTOCK_ROUTE_TABLE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = 0 }; /* entry 0 of every pool is never used */

struct entry {
    uint64_t key, mask;
    uint32_t chained, newer, older;
    uint32_t group; /* FREE in a free entry */
};
static const uint32_t FREE = UINT32_MAX;

struct table {
    struct entry *entries;
    uint32_t *buckets;
    uint32_t bucket_mask, capacity;
    uint32_t num_entries, num_used; /* pool entries beyond num_used were never touched */
    uint32_t free, newest, oldest;
};

static int table_open(struct table *table, uint32_t capacity) {
    uint32_t num_buckets = 1;
    while (num_buckets < capacity) num_buckets *= 2;
    *table = (struct table){.bucket_mask = num_buckets - 1, .capacity = capacity};
    table->entries = calloc((size_t)capacity + 1, sizeof *table->entries);
    table->buckets = calloc(num_buckets, sizeof *table->buckets);
    return table->entries && table->buckets;
}

static void table_close(struct table *table) {
    free(table->entries);
    free(table->buckets);
}

static inline uint32_t *bucket_of(const struct table *table, uint64_t seed, uint64_t key, uint32_t group) {
    uint64_t mixed = (key ^ seed ^ (uint64_t)group << 48) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 32) * (seed | 1);
    return &table->buckets[mixed >> 32 & table->bucket_mask];
}

static inline uint32_t find(const struct table *table, uint64_t seed, uint64_t key, uint32_t group) {
    uint32_t at = *bucket_of(table, seed, key, group);
    while (at != NONE && (table->entries[at].key != key || table->entries[at].group != group))
        at = table->entries[at].chained;
    return at;
}

/* Prefetch the memory that `find` will read: the bucket of a key some steps ahead, the entry of a nearer one. In a
 * large table every lookup is a cache miss, and a prompt has thousands. */
enum { FAR = 12, NEAR = 6 };
static inline void fetch_bucket(const struct table *table, uint64_t seed, uint64_t key, uint32_t group) {
    __builtin_prefetch(bucket_of(table, seed, key, group));
}
static inline void fetch_entry(const struct table *table, uint64_t seed, uint64_t key, uint32_t group) {
    __builtin_prefetch(&table->entries[*bucket_of(table, seed, key, group)]);
}

static void unlist(struct table *table, uint32_t at) {
    struct entry *entry = &table->entries[at];
    *(entry->newer ? &table->entries[entry->newer].older : &table->newest) = entry->older;
    *(entry->older ? &table->entries[entry->older].newer : &table->oldest) = entry->newer;
}

static void list_first(struct table *table, uint32_t at) {
    struct entry *entry = &table->entries[at];
    entry->newer = NONE;
    entry->older = table->newest;
    *(table->newest ? &table->entries[table->newest].newer : &table->oldest) = at;
    table->newest = at;
}

static void touch(struct table *table, uint32_t at) {
    if (table->newest == at) return;
    unlist(table, at);
    list_first(table, at);
}

static void drop(struct table *table, uint64_t seed, uint32_t at) {
    struct entry *entry = &table->entries[at];
    uint32_t *link = bucket_of(table, seed, entry->key, entry->group);
    while (*link != at) link = &table->entries[*link].chained;
    *link = entry->chained;
    unlist(table, at);
    entry->group = FREE;
    entry->mask = 0;
    entry->chained = table->free;
    table->free = at;
    table->num_entries--;
}

/* Add an entry without bits as the most recently used one. The caller has checked that the table is not full. */
static uint32_t add(struct table *table, uint64_t seed, uint64_t key, uint32_t group) {
    uint32_t at = table->free;
    if (at != NONE)
        table->free = table->entries[at].chained;
    else
        at = ++table->num_used;
    uint32_t *bucket = bucket_of(table, seed, key, group);
    table->entries[at] = (struct entry){.key = key, .group = group, .chained = *bucket};
    *bucket = at;
    list_first(table, at);
    table->num_entries++;
    return at;
}

static void table_empty(struct table *table) {
    if (table->num_used == 0) return;
    memset(table->buckets, 0, ((size_t)table->bucket_mask + 1) * sizeof *table->buckets);
    table->num_entries = table->num_used = table->free = table->newest = table->oldest = 0;
}

static uint64_t table_bytes(const struct table *table) {
    return (table->capacity + 1ull) * sizeof(struct entry) + (table->bucket_mask + 1ull) * sizeof(uint32_t);
}

/* Check that every entry is found by its key and is in the list once, and that the count is right. */
static int table_is_sound(const struct table *table, uint64_t seed) {
    uint32_t num_listed = 0, newer = NONE;
    for (uint32_t at = table->newest; at; newer = at, at = table->entries[at].older) {
        const struct entry *entry = &table->entries[at];
        if (++num_listed > table->num_entries || entry->newer != newer || !entry->mask) return 0;
        if (find(table, seed, entry->key, entry->group) != at) return 0;
    }
    return num_listed == table->num_entries && table->oldest == newer && num_listed <= table->capacity;
}

#endif
