/* Set logits[rows[i]][t] = lowest where bit t % 32 of masks[i][t / 32] is 0, t < vocab (executor/sampling/edits.py).
 * Elements have 2 or 4 bytes; `lowest` is the bit pattern of minus infinity. row_stride counts elements. */
void penstock_mask(uintptr_t logits, int64_t row_stride, int element_bytes, uint32_t lowest, uintptr_t rows,
                   uintptr_t masks, int64_t num_rows, int64_t words, int64_t vocab);
