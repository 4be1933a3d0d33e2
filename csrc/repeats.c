/* Search for repetitions in a request's tokens: one backward scan from the end, without state between calls. */
#include <stddef.h>
#include <stdint.h>

#include "repeats.cdef.h"

enum { STRIDE = 16 }; /* tokens compared with the last one per iteration, by a loop without a branch */

int64_t penstock_find_repeat(const int32_t *tokens, int64_t num_tokens, int64_t first, int64_t least, int64_t most) {
    if (num_tokens - first <= least) return -1;
    const int32_t last = tokens[num_tokens - 1];
    const int64_t lowest = first + least - 1; /* an occurrence that ends earlier would begin before `first` */
    int64_t next = -1, longest = least - 1;
    for (int64_t end = num_tokens - 2; end >= lowest; end--) {
        while (end - STRIDE >= lowest) {
            int found = 0;
            for (int i = 0; i < STRIDE; i++) found |= tokens[end - i] == last;
            if (found) break;
            end -= STRIDE;
        }
        int64_t length = 0;
        while (length < most && end - length >= first && tokens[end - length] == tokens[num_tokens - 1 - length])
            length++;
        if (length <= longest) continue;
        next = end + 1, longest = length;
        if (longest == most) break;
    }
    return next;
}
