/* The router's index (router/placement/index.py): which replica's slot holds which blocks. Keys are the low 64 bits of block
 * keys. Every function takes the index's own lock, so any thread may call any of them. */

/* An index of at most `capacity` facts and `num_hopes` hopes for up to 8192 slots; NULL: out of memory. `seed` moves the
 * hash buckets, so that no client can aim at one. */
void *penstock_route_open(uint32_t capacity, uint32_t num_hopes, uint64_t seed);
void penstock_route_close(void *index);

/* A slot that holds nothing, for at most `limit` blocks; -1: none is free now. Retired slots become free again as the
 * sweep goes on, a stretch with every call, so a later call may succeed. */
int penstock_route_add_slot(void *index, uint64_t limit);

/* A key of this slot stands for all before it: what counts is the last one of a prompt, with or without those before. */
void penstock_route_match_at_ends(void *index, uint32_t slot);

/* Forget a slot at once. Its bits are swept up bit by bit, and then its number is handed out again. */
void penstock_route_retire_slot(void *index, uint32_t slot);

/* Facts: `slot` holds these blocks, or no longer does. A key has 8 bytes, little endian. `store` returns how many the slot's limit refused. */
uint64_t penstock_route_store(void *index, uint32_t slot, const uint8_t *keys, size_t num_keys);
void penstock_route_remove(void *index, uint32_t slot, const uint8_t *keys, size_t num_keys);

/* Hopes: `slot` will soon hold these blocks. They fade at the second `fade` after they were spoken. Facts among the
 * first `num_known` are only marked as used. */
void penstock_route_hope(void *index, uint32_t slot, const uint64_t *keys, size_t num_keys, size_t num_known);
void penstock_route_fade(void *index);

/* counts[slot] = how many leading blocks it holds, by facts or hopes, for slots below `num_slots`. Assumes that a slot with a
 * block has those before it, unless it matches at ends: then the last of the first `num_ends` keys counts. */
void penstock_route_match(void *index, const uint64_t *keys, size_t num_keys, size_t num_ends, int32_t *counts,
                          size_t num_slots);

/* The low 64 bits of the keys of a prompt's full blocks. `root` has the 32 bytes that the SHA-256 chain starts from. */
void penstock_route_keys(const uint8_t *root, const uint8_t *tokens, size_t num_blocks, size_t block_size,
                         uint64_t *keys);

uint64_t penstock_route_num_held(void *index, uint32_t slot);

/* out: facts in the table, hopes in both tables, facts evicted for room, bytes reserved. */
void penstock_route_stats(void *index, uint64_t out[4]);

/* 1 if every invariant holds; O(entries). */
int penstock_route_check(void *index);
