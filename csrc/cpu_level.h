/* Shared by the executor's C kernels: their internal structs, and one table of functions per instruction level. Their
 * arguments are in cpu_ops.cdef.h; the Python side (executor/kernels/cpu_ops.py) has checked dtypes and shapes. */
#ifndef PENSTOCK_CPU_LEVEL_H
#define PENSTOCK_CPU_LEVEL_H

#include "addresses.h"
#include "codes.h"
#include "cpu_ops.cdef.h"
#include "cpu_threads.h"

enum element { FLOAT32 = 0, BFLOAT16 = 1 };
enum activation { SILU = 0, GELU_TANH = 1, CLAMPED_SWISH = 2, SIGMOID = 3 };

/* 2^x = sum of POWER_k x^k on [-1/2, 1/2]: a minimax fit with an error of 2e-9 before rounding, exact at 0. */
#define POWER_0 1.0f
#define POWER_1 0.693147182f
#define POWER_2 0.240226462f
#define POWER_3 0.0555032864f
#define POWER_4 0.00961848907f
#define POWER_5 0.00133999309f
#define POWER_6 0.000153458124f

/* Positions are attended in tiles that start at fixed multiples of TILE, whatever the batch: see cpu_attention.h. */
#define TILE 128

/* Units of work to divide among threads. */
#define CHANNELS 256 /* of a convolution: four of its inputs and the weights fit into the L1 cache */

/* Adjacent tiles for adjacent queries of one row: all their tiles, or a piece that is merged with other pieces. */
struct attention_job {
    int row, first_query, num_queries; /* first_query: index within the row */
    int first_tile, num_tiles;
    int first_piece, num_pieces; /* the index of the job that has the first tiles, and how many jobs share them */
    int64_t partial;             /* offset of the results of its tiles; -1: the job has all tiles */
};

/* The result of one tile for `rows` rows: largest score [rows], sum of weights [rows], weighted values [rows, width]
 * with head_dim in whole vectors of any level. */
static inline int64_t partial_width(int head_dim) { return (head_dim + 15) / 16 * 16; }
static inline int64_t partial_floats(int rows, int head_dim) { return rows * (partial_width(head_dim) + 2); }

/* y [rows, width] = x [rows, depth words] weight + bias; the weight is in blocks [depth, columns] of words. The work is
 * divided among threads by blocks and by parts of `part_rows` rows, which balances the load. The parts go along the rows
 * of a block, or, if the depth is so small that writing y takes most of the time, along the blocks of a few rows. */
#define LINEAR_ROWS 96
#define SMALL_DEPTH 64 /* words: at most this is by rows, in parts of … */
#define FEW_ROWS 12
struct linear {
    const void *x;
    const uint32_t *weight;
    const float *bias; /* NULL: none */
    void *y;
    int64_t rows, x_stride, depth, width, y_stride; /* x_stride in words of x */
    int64_t part_rows, inner_parts; /* inner_parts: blocks if is_by_rows, else parts of rows */
    int is_by_rows, has_pairs, adds; /* has_pairs: the weight is bfloat16, whatever x is; adds: y is added to */
};

/* A block of a weight, columns [first, first + columns). All have a level's number of columns, but those of the rest
 * have at most NARROW_COLUMNS. */
#define NARROW_COLUMNS 16
struct block {
    int64_t first, columns;
};

static inline struct block block_at(int64_t index, int64_t width, int64_t columns) {
    int64_t whole = width / columns, narrow = columns < NARROW_COLUMNS ? columns : NARROW_COLUMNS;
    if (index < whole) return (struct block){index * columns, columns};
    return (struct block){whole * columns + (index - whole) * narrow, narrow};
}

static inline int64_t num_blocks(int64_t width, int64_t columns) {
    int64_t narrow = columns < NARROW_COLUMNS ? columns : NARROW_COLUMNS;
    return width / columns + (width % columns + narrow - 1) / narrow;
}

/* Activations quantized to int16 with a scale per chunk. `sums` has the sum of each half chunk, `negative_sums` has
 * -sum * scale of each chunk, of its first half and of its second half. The layout is [chunks, rows], so rows that are
 * computed together are adjacent. An integer is 256 * upper + lower; `bytes` has the upper bytes of a chunk (each four
 * in the order of BYTE_OF), then the lower bytes. */
struct quantized_inputs {
    int64_t rows;
    int uses_bytes; /* products are computed from `bytes` */
    int16_t *values;
    float *scales;
    int32_t *sums;
    float *negative_sums[3];
    uint32_t *bytes; /* `bytes` or `values` is NULL if no kernel reads it */
};

struct quantize {
    const void *x;
    int64_t x_stride, depth;
    struct quantized_inputs out;
};

/* The product of struct linear with a quantized weight (codes.h). */
struct quantized_linear {
    const struct code_type *type;
    struct quantized_inputs x;
    const uint8_t *weight;
    const float *bias; /* NULL: none */
    void *y;
    int64_t first_row, rows, depth, width, y_stride;
    int64_t row_parts, parts_between; /* parts between a thread's chunk of work and its next one */
};

/* Kernels for quantized weights. They multiply integers, so levels with and without bfloat16 products share them. */
struct quantized_kernels {
    range_function *quantize[2], *linear[2]; /* process rows; parts */
    int panel_columns;                       /* per panel of codes */
    int has_vnni;
    int max_byte_rows; /* largest number of rows for which products are computed from bytes */
};

struct cpu_level {
    /* Functions for parallel_for, indexed by element type: each processes rows of penstock_ and its name. */
    range_function *norm[2], *gate[4][2], *rope[2];
    void (*attend[2])(const struct penstock_attention *, const struct attention_job *, int kv_head, float *partials,
                      void *scratch);
    void (*combine[2])(const struct penstock_attention *, const struct attention_job *, int kv_head,
                       const float *partials, void *scratch);
    int64_t (*scratch_bytes)(int head_dim, int rows);
    range_function *linear[2]; /* processes parts */
    int columns; /* per block of a linear layer's weight */
    const struct quantized_kernels *quantized; /* NULL: the level has none */
    range_function *convolve[2], *delta[2]; /* process blocks of channels; heads */
};

extern const struct quantized_kernels quantized_avx2, quantized_avx512;
extern const struct cpu_level cpu_level_portable, cpu_level_avx2, cpu_level_avx512, cpu_level_avx512_bf16;

/* Attention of a whole batch, cut into jobs for several threads (cpu_plan.c). Return 0, or -1 if memory cannot be
 * allocated. */
int attend_batch(const struct cpu_level *level, const struct penstock_cpu *cpu, const struct penstock_attention *a);

#endif
