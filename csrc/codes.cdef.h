/* Quantized weights of GGUF files (executor/kernels/stored_formats.py). Addresses are integers. */

/* Return the name of a type. Types are numbered from 0; beyond the last one, return NULL. */
const char *penstock_code_name(int type);
int penstock_code_block_values(int type);
int penstock_code_block_bytes(int type);

/* Dequantize blocks of a file to float32 [blocks, values]. Return -1, or the index of the first block with a scale or
 * minimum that is not finite. */
int64_t penstock_code_values(int type, uintptr_t bytes, int64_t blocks, uintptr_t values);

/* Unpack blocks of a file into groups of penstock_code_group_values neighbours: uint8 codes [blocks, values], float32
 * scales and, if penstock_code_has_minima, minima [blocks, values / group]. A weight is code * scale - minimum or,
 * without minima, (code - 2^(bits - 1)) * scale with penstock_code_group_bits. Return as penstock_code_values does. */
int penstock_code_group_bits(int type);
int penstock_code_group_values(int type);
int penstock_code_has_minima(int type);
int64_t penstock_code_groups(int type, uintptr_t bytes, int64_t blocks, uintptr_t codes, uintptr_t scales,
                             uintptr_t minima);

/* Pack the weight [rows, depth] of a file into panels of `columns` rows, which have penstock_code_bytes bytes and are
 * zero before. Return -1, or the index of the first row with a scale or minimum that is not finite. */
int64_t penstock_code_bytes(int type, int64_t rows, int64_t depth, int columns);
int64_t penstock_code_pack(int type, uintptr_t bytes, int64_t rows, int64_t depth, int columns, uintptr_t panels);
/* Pack uint8 codes [rows, depth] with a 16-bit scale and optionally a zero point (`zeros` 0: the middle code) for each
 * `group` in depth, both [rows, depth / group]. `type` is Q4_0, Q8_0 or a type that is not a GGUF type. */
void penstock_group_pack(int type, uintptr_t codes, uintptr_t scales, uintptr_t zeros, int64_t rows, int64_t depth,
                         int64_t group, int columns, uintptr_t panels);
/* Dequantize `num` rows of a packed weight of `height` rows, given their int64 indices, to float32 [num, depth]. Return
 * -1 if an index is out of range, else 0. */
int penstock_code_rows(int type, uintptr_t panels, int64_t height, int64_t depth, int columns, uintptr_t indices,
                       int64_t num, uintptr_t rows);
