/* Find the longest suffix of `most` down to `least` tokens that occurs earlier, beginning at `first` or later; of
 * several occurrences, take the last. Return the index of the token that follows it, or -1 (engine/core/drafts.py). */
int64_t penstock_find_repeat(const int32_t *tokens, int64_t num_tokens, int64_t first, int64_t least, int64_t most);
