/* Shared by the executor's C kernels: their arguments, and one table of functions per instruction level. Strides count
 * elements. The Python side (executor/kernels/cpu_ops.py) has checked dtypes and shapes. */
#ifndef PENSTOCK_CPU_LEVEL_H
#define PENSTOCK_CPU_LEVEL_H

#include <stdint.h>

#include "codes.h"
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

/* y = norm(x) * weight; with `residual`, x + residual is normed and also stored in `total`. */
struct norm {
    const void *x, *residual;
    const float *weight;
    void *y, *total;
    int64_t x_stride, residual_stride, width;
    float eps;
};

struct gate {
    const void *gate, *up;
    void *out;
    int64_t gate_stride, up_stride, width; /* of a row of out */
};

struct rope {
    const void *q, *k, *v;
    int64_t q_stride, k_stride, v_stride; /* from token to token; heads are adjacent */
    const float *cos, *sin;               /* [positions, half] */
    const int32_t *positions;
    const int64_t *kv_slots;
    const float *q_weight, *k_weight; /* NULL: no norm */
    void *q_out, *k_pages, *v_pages;
    int64_t page_stride, slot_stride;
    int q_heads, kv_heads, head_dim, half, page_size;
    float eps;
};

/* Positions are attended in tiles that start at fixed multiples of TILE, whatever the batch: see cpu_attention.h. */
#define TILE 128

struct attention {
    const void *q, *k_pages, *v_pages;
    void *out;
    int64_t q_stride, page_stride, slot_stride, table_stride;
    const int32_t *query_starts, *context_lens, *block_tables;
    int num_rows, q_heads, kv_heads, head_dim, page_size;
    int window; /* positions that a query attends to, its own included; 0: all */
    float scale_log2; /* the softmax scale times log2(e); with a cap, the cap times log2(e) */
    float squeeze;    /* 0: no cap; else 2^(score * squeeze) = e^(2 x), from which tanh(x) is computed */
    const float *sinks; /* [q_heads]: attention sinks, scores of a position without a value; NULL: none */
};

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
 * divided among threads by blocks and by parts of LINEAR_ROWS rows, which balances the load. */
#define LINEAR_ROWS 96
struct linear {
    const void *x;
    const uint32_t *weight;
    const float *bias; /* NULL: none */
    void *y;
    int64_t rows, x_stride, depth, width, y_stride; /* x_stride in words */
    int64_t row_parts;
};

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

/* y += (x down) up: the LoRA adapter that some rows share, for one linear layer (cpu_ops.cdef.h). */
#define MAX_DOWN_STRIDE 800
struct penstock_adapter;
struct lora {
    const void *x;
    void *y;
    int64_t x_stride, y_stride, depth;
    const struct penstock_adapter *adapter;
};

/* The causal convolution of cpu_recurrent.cdef.h. */
struct penstock_states;
struct penstock_delta;
struct convolve {
    const struct penstock_states *states;
    const void *x;
    const float *weight, *bias; /* bias NULL: none */
    void *y;
    int64_t x_stride, channels;
    int taps, has_silu;
};

struct cpu_level {
    const char *name;
    /* Functions for parallel_for, indexed by element type: each processes rows of the struct of its name. */
    range_function *norm[2], *gate[4][2], *rope[2];
    void (*attend[2])(const struct attention *, const struct attention_job *, int kv_head, float *partials,
                      void *scratch);
    void (*combine[2])(const struct attention *, const struct attention_job *, int kv_head, const float *partials,
                       void *scratch);
    int64_t (*scratch_bytes)(int head_dim, int rows);
    range_function *linear[2]; /* processes parts */
    int columns; /* per block of a linear layer's weight */
    range_function *quantize[2], *quantized_linear[2]; /* process rows; parts */
    int panel_columns; /* per panel of codes; 0: the level has no kernels for quantized weights */
    int has_vnni;
    int max_byte_rows; /* largest number of rows for which products are computed from bytes */
    void (*lora[2])(const struct lora *, int64_t first_row, int64_t end_row);
    void (*convolve[2])(const struct convolve *, int row, int64_t first_channel, int64_t end_channel);
    void (*delta[2])(const struct penstock_delta *, const struct penstock_states *, int row, int head);
};

extern const struct cpu_level cpu_level_portable, cpu_level_avx2, cpu_level_avx512, cpu_level_avx512_bf16;

/* Return a call's level, and the number of threads to use for `cost`, a number of multiplications. */
struct penstock_cpu;
const struct cpu_level *level_of(const struct penstock_cpu *cpu);
int threads_for(int64_t cost, const struct penstock_cpu *cpu);

#endif
