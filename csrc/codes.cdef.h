/* Quantized weights of GGUF files (executor/kernels/weight.py). Addresses are integers; types are numbered as here. */

/* NULL beyond the last. */
const char *penstock_code_name(int type);
int penstock_code_block_values(int type);
int penstock_code_block_bytes(int type);

/* float32 [blocks, values]: what `blocks` of a file say. -1, or the first with a scale or a minimum that is not finite. */
int64_t penstock_code_values(int type, uintptr_t bytes, int64_t blocks, uintptr_t values);

/* `blocks` of a file as groups of penstock_code_group_values neighbours: uint8 codes [blocks, values], float32 scales and,
 * if penstock_code_has_minima, minima [blocks, values / group]. A value is code * scale - minimum, or, without minima,
 * (code - 2^(bits - 1)) * scale, with bits of penstock_code_group_bits. Returns as penstock_code_values. */
int penstock_code_group_bits(int type);
int penstock_code_group_values(int type);
int penstock_code_has_minima(int type);
int64_t penstock_code_groups(int type, uintptr_t bytes, int64_t blocks, uintptr_t codes, uintptr_t scales,
                             uintptr_t minima);

/* Rows [rows, depth] of a weight, as a file has them, into panels of `columns` rows: penstock_code_bytes of them, zeros
 * before. -1, or the first row with a scale or a minimum that is not finite. */
int64_t penstock_code_bytes(int type, int64_t rows, int64_t depth, int columns);
int64_t penstock_code_pack(int type, uintptr_t bytes, int64_t rows, int64_t depth, int columns, uintptr_t panels);
/* The same of codes [rows, depth], a byte each, with a scale of 16 bits and perhaps the code of zero (0: the middle one) for
 * each `group` of depth, [rows, depth / group]. `type` is Q4_0, Q8_0 or one of those that no file has. */
void penstock_group_pack(int type, uintptr_t codes, uintptr_t scales, uintptr_t zeros, int64_t rows, int64_t depth,
                         int64_t group, int columns, uintptr_t panels);
/* float32 [num, depth]: the rows of such a weight of `height` rows with these int64 numbers. -1 if a number is none of its
 * rows', else 0. */
int penstock_code_rows(int type, uintptr_t panels, int64_t height, int64_t depth, int columns, uintptr_t numbers,
                       int64_t num, uintptr_t rows);
