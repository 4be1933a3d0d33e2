/* Quantized weights of GGUF files (executor/loading/codes.py). Addresses are integers; types are numbered as here. */

/* NULL beyond the last. */
const char *penstock_code_name(int type);
int penstock_code_block_values(int type);
int penstock_code_block_bytes(int type);

/* float32 [blocks, values]: what `blocks` of a file say. -1, or the first with a scale or a minimum that is not finite. */
int64_t penstock_code_values(int type, uintptr_t bytes, int64_t blocks, uintptr_t values);

/* Rows [rows, depth] of a weight, as a file has them, into panels of `columns` rows: penstock_code_bytes of them, zeros
 * before. -1, or the first row with a scale or a minimum that is not finite. */
int64_t penstock_code_bytes(int type, int64_t rows, int64_t depth, int columns);
int64_t penstock_code_pack(int type, uintptr_t bytes, int64_t rows, int64_t depth, int columns, uintptr_t panels);
/* float32 [num, depth]: the rows of such a weight of `height` rows with these int64 numbers. -1 if a number is none of its
 * rows', else 0. */
int penstock_code_rows(int type, uintptr_t panels, int64_t height, int64_t depth, int columns, uintptr_t numbers,
                       int64_t num, uintptr_t rows);
