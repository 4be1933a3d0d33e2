/* Where the end of a text stands earlier in it: of the longest suffix of `most` down to `least` tokens that does, at or
 * behind `first`, the place that is nearest to the end. Returns the index of the token that followed there, or -1
 * (engine/core/drafts.py). */
int64_t penstock_find_repeat(const int32_t *tokens, int64_t num_tokens, int64_t first, int64_t least, int64_t most);
