/* The router's index (router/placement/index.py) of the blocks that each slot, a tier of a replica, holds. Keys are the
 * low 64 bits of block keys. Every function locks the index, so any thread may call it. */

/* Create an index of at most `capacity` facts and `num_predictions` predictions for up to 8192 slots; NULL if memory is
 * lacking. The `seed` randomizes the hash buckets, so that clients cannot provoke collisions. */
void *penstock_route_open(uint32_t capacity, uint32_t num_predictions, uint64_t seed);
void penstock_route_close(void *index);

/* Return an empty slot for at most `limit` blocks; -1 if none is free now. Every call sweeps some entries, which frees
 * retired slots, so a later call may succeed. With `at_ends`, a key in this slot implies all keys before it: only the
 * last match of a prompt counts. */
int penstock_route_add_slot(void *index, uint64_t limit, int at_ends);

/* Stop matching a slot at once. Its bits are swept gradually; then its number is reused. */
void penstock_route_retire_slot(void *index, uint32_t slot);

/* Add or remove facts of `slot`. A key has 8 bytes, little endian. `store` returns how many keys the limit refused. */
uint64_t penstock_route_store(void *index, uint32_t slot, const uint8_t *keys, size_t num_keys);
void penstock_route_remove(void *index, uint32_t slot, const uint8_t *keys, size_t num_keys);

/* Add predictions: `slot` is expected to hold these blocks soon. They end at the second `age_predictions` after this
 * call. Facts among the first `num_known` keys are only marked as used. */
void penstock_route_predict(void *index, uint32_t slot, const uint64_t *keys, size_t num_keys, size_t num_known);
void penstock_route_age_predictions(void *index);

/* Set counts[slot] to the number of leading blocks it holds, by facts or predictions, for slots below `num_slots`. This
 * assumes that a slot with a block has all before it; a slot that matches at ends counts up to its last of the first
 * `num_ends`. */
void penstock_route_match(void *index, const uint64_t *keys, size_t num_keys, size_t num_ends, int32_t *counts,
                          size_t num_slots);

/* Compute the low 64 bits of the keys of a prompt's full blocks. `root` is the 32-byte start of the SHA-256 chain. */
void penstock_route_keys(const uint8_t *root, const uint8_t *tokens, size_t num_blocks, size_t block_size,
                         uint64_t *keys);

uint64_t penstock_route_num_held(void *index, uint32_t slot);

/* Set out to: facts in the table, predictions in both tables, facts evicted, bytes reserved. */
void penstock_route_stats(void *index, uint64_t out[4]);

/* Return 1 if every invariant holds; O(entries). */
int penstock_route_check(void *index);
