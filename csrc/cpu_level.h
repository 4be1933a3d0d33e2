/* Shared by the executor's C kernels: their arguments, and one table of functions per instruction level.
 *
 * Strides count elements. The Python side (executor/kernels/cpu_ops.py) has checked dtypes and shapes. */
#ifndef PENSTOCK_CPU_LEVEL_H
#define PENSTOCK_CPU_LEVEL_H

#include <stdint.h>

#include "codes.h"
#include "cpu_threads.h"

enum element { FLOAT32 = 0, BFLOAT16 = 1 };
enum activation { SILU = 0, GELU_TANH = 1, CLAMPED_SWISH = 2, SIGMOID = 3 };

/* 2^x = sum of POWER_k x^k on [-1/2, 1/2]: a minimax fit, 2e-9 off before rounding, and exact at 0. */
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
    int64_t q_stride, k_stride, v_stride; /* from token to token; heads lie side by side */
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
    int window; /* positions a query sees, itself included; 0: all */
    float scale_log2; /* the softmax scale times log2(e); with a cap, the cap times log2(e) */
    float squeeze;    /* 0: no cap; else 2^(score * squeeze) is e^(2 x), of which tanh(x) is made */
    const float *sinks; /* [q_heads]: a score beside those of the positions, which has no value; NULL: none */
};

/* A run of tiles for neighbouring queries of one row: all their tiles, or a piece that is combined with others. */
struct attention_job {
    int row, first_query, num_queries; /* queries counted inside the row */
    int first_tile, num_tiles;
    int first_piece, num_pieces; /* the index of the job that has the first tiles, and how many jobs share them */
    int64_t partial;             /* where the results of its tiles go, one after the other; -1: it has all tiles */
};

/* The result of one tile for `rows` rows: largest score [rows], sum of weights [rows], weighted values [rows, width]
 * with head_dim in whole vectors of any level. */
static inline int64_t partial_width(int head_dim) { return (head_dim + 15) / 16 * 16; }
static inline int64_t partial_floats(int rows, int head_dim) { return rows * (partial_width(head_dim) + 2); }

/* y [rows, width] = x [rows, depth words] weight + bias; the weight lies in blocks [depth, columns] of words. Threads
 * share the blocks and, so that none is left with one more than the other, parts of LINEAR_ROWS rows. */
#define LINEAR_ROWS 96
struct linear {
    const void *x;
    const uint32_t *weight;
    const float *bias; /* NULL: none */
    void *y;
    int64_t rows, x_stride, depth, width, y_stride; /* x_stride in words */
    int64_t row_parts;
};

/* Inputs as integers of 16 bits, with a scale for each chunk, a sum for each half of one, and sums times minus the scale:
 * of the chunk, and of its halves. They are stored chunk after chunk, and in a chunk row after row, so that rows that are
 * computed together lie together. An integer is 256 * upper + lower; `bytes` has a chunk's upper bytes (each four in the
 * order of BYTE_OF) and then its lower ones. */
struct integers {
    int64_t rows;
    int is_few; /* they are multiplied by their bytes */
    int16_t *values;
    float *scales;
    int32_t *sums;
    float *below[3];
    uint32_t *bytes; /* this and `values`: NULL where nothing reads them */
};

struct quantize {
    const void *x;
    int64_t x_stride, depth;
    struct integers to;
};

/* The same product with a weight that is kept as codes. */
struct coded {
    const struct code_type *type;
    struct integers x;
    const uint8_t *weight;
    const float *bias; /* NULL: none */
    void *y;
    int64_t first_row, rows, depth, width, y_stride;
    int64_t row_parts, others; /* parts that the other threads take before a thread takes more */
};

/* Rows that have one adapter, and what it adds to a product of theirs (cpu_ops.cdef.h). */
#define MOST_RANKS 800
struct penstock_adapter;
struct low_rank {
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
    /* Operations as `spread` takes them, by element: over the rows of a struct of their name. */
    work_on *norm[2], *gate[4][2], *rope[2];
    void (*attend[2])(const struct attention *, const struct attention_job *, int kv_head, float *partials,
                      void *scratch);
    void (*combine[2])(const struct attention *, const struct attention_job *, int kv_head, const float *partials,
                       void *scratch);
    int64_t (*scratch_bytes)(int head_dim, int rows);
    work_on *linear[2]; /* over parts */
    int columns; /* of a block of a linear's weight */
    work_on *quantize[2], *coded[2]; /* over rows; over parts */
    int coded_columns; /* of a panel of codes; 0: the level computes no codes */
    int has_vnni;
    int few_rows;      /* up to so many are multiplied by their bytes */
    void (*low_rank[2])(const struct low_rank *, int64_t first_row, int64_t end_row);
    void (*convolve[2])(const struct convolve *, int row, int64_t first_channel, int64_t end_channel);
    void (*delta[2])(const struct penstock_delta *, const struct penstock_states *, int row, int head);
};

extern const struct cpu_level cpu_level_portable, cpu_level_avx2, cpu_level_avx512, cpu_level_avx512_bf16;

/* A call's level, and how many threads so much work is worth: products of two numbers, or as much. */
struct penstock_cpu;
const struct cpu_level *level_of(const struct penstock_cpu *cpu);
int threads_for(int64_t cost, const struct penstock_cpu *cpu);

#endif
