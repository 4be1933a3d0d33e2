/* Kernels of the executor for CPU tensors (executor/kernels/cpu_ops.py, which describes and checks the arguments).
 * Addresses are integers, so that Python passes data_ptr() without a cast; 0 is none. Strides count elements. */

/* How calls are to run: index of the instruction level, threads to use at most, 1 for bfloat16 and 0 for float32. */
struct penstock_cpu {
    int level, num_threads, is_bfloat16;
};

/* The vector instructions that this CPU has. VNNI and BF16 are apart: Cascade Lake and Ice Lake have only the former. */
enum penstock_instructions {
    PENSTOCK_AVX2 = 1,   /* with FMA and F16C */
    PENSTOCK_AVX512 = 2, /* F, BW, DQ and VL */
    PENSTOCK_VNNI = 4,   /* AVX-512's dot product of integers */
    PENSTOCK_BF16 = 8    /* AVX-512's dot product of bfloat16 */
};
int penstock_cpu_instructions(void);
/* The levels that a CPU with these instructions can run are 0 … the returned number, the last being the fastest. */
int penstock_cpu_best_level(int instructions);
const char *penstock_cpu_level_name(int level);

/* 1 if there are threads to borrow; otherwise everything runs on the calling thread. */
int penstock_cpu_has_team(void);

void penstock_norm(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t residual,
                   int64_t residual_stride, uintptr_t weight, uintptr_t y, uintptr_t total, int64_t rows,
                   int64_t width, float eps);

/* out = activation(gate) * up, which may be where `up` is. activation: 0 silu, 1 gelu in its tanh form, 2 the bounded swish
 * of gpt-oss, 3 the sigmoid. */
void penstock_gate(const struct penstock_cpu *cpu, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                   int64_t up_stride, uintptr_t out, int64_t rows, int64_t width);

void penstock_rope(const struct penstock_cpu *cpu, int64_t tokens, uintptr_t q, int64_t q_stride, uintptr_t k,
                   int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t cos, uintptr_t sin, int half,
                   uintptr_t positions, uintptr_t kv_slots, uintptr_t q_weight, uintptr_t k_weight, float eps,
                   uintptr_t q_out, uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride,
                   int q_heads, int kv_heads, int head_dim, int page_size);

/* -1 if there is no memory for the work, else 0. window 0: none; cap 0: none, else scores are cap * tanh(score / cap).
 * sinks, float32 [q_heads] or 0: a score of each head that takes its share of the weights, and has no value. */
int penstock_attention(const struct penstock_cpu *cpu, int rows, uintptr_t query_starts, uintptr_t context_lens,
                       uintptr_t block_tables, int64_t table_stride, uintptr_t q, int64_t q_stride,
                       uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride, uintptr_t out,
                       int q_heads, int kv_heads, int head_dim, int page_size, float scale, int window, float cap,
                       uintptr_t sinks);

/* A part of a layer: these rows of x give these columns of y. Its weight [width, depth] is kept as codes of a type of
 * codes.cdef.h, in panels of penstock_coded_columns(level) rows; or it is numbers, PENSTOCK_NUMBERS, cut into blocks of
 * penstock_cpu_columns(level) rows (zeros beyond `width`), each of them transposed. For bfloat16 a pair of neighbours in
 * depth stays together. */
enum penstock_part_type { PENSTOCK_NUMBERS = -1 };
struct penstock_part {
    int type;
    uintptr_t weight, bias;      /* bias: float32, 0: none */
    int64_t column, width;
    int64_t first_row, num_rows; /* -1: all */
};

/* y [rows, width] from x [rows, depth], depth in whole blocks of every type; of numbers in bfloat16 it and x_stride are
 * even. `scratch` has penstock_product_scratch bytes. -1 if there is no memory for the work, else 0. */
int penstock_product(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t scratch, int num,
                     const struct penstock_part *parts, uintptr_t y, int64_t rows, int64_t depth, int64_t width);
int64_t penstock_product_scratch(int num, const struct penstock_part *parts, int64_t rows, int64_t depth);
int penstock_cpu_columns(int level);
int penstock_coded_columns(int level);

/* y [rows, depth words]: the rows of a weight of numbers with these int64 numbers, as they were before it was cut. -1 if a
 * number is none of its rows', else 0. */
int penstock_linear_rows(const struct penstock_cpu *cpu, uintptr_t weight, uintptr_t numbers, uintptr_t y, int64_t rows,
                         int64_t depth, int64_t width);

/* Adapters of low rank over a product's rows (executor/kernels/low_rank.py). Weights are float32 or bfloat16, in rows of
 * a multiple of 16 numbers. */

/* For these columns of y: `up` [rank, width], which multiplies the inner numbers from `first` on. */
struct penstock_adapter_part {
    uintptr_t up;
    int64_t up_stride, first, rank, column, width;
};

/* One LoRA adapter of one product: y += (x down) up, with `down` [depth, sum of the parts' ranks]. */
struct penstock_adapter {
    uintptr_t down;
    int64_t down_stride; /* at most 768 + 16 */
    int64_t num_weights;
    const struct penstock_adapter_part *parts;
    int num_parts, is_bfloat16; /* no parts: nothing */
};

/* Rows next to each other that have the same adapter: what it adds to each of the model's products. */
struct penstock_run {
    int64_t first, count;
    const struct penstock_adapter *adapters;
};

/* y [rows, width] += what the runs' adapters make of x [rows, depth] for this product. */
void penstock_adapt(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride,
                    int64_t depth, int num_runs, const struct penstock_run *runs, int product);

/* The layers of a decoder in one call (cpu_layers.c, executor/kernels/cpu_layers.py): what a model computes layer by layer through
 * the functions above, with the same kernels in the same order. */

struct penstock_projection {
    const struct penstock_part *parts;
    int num_parts; /* 0: the layer has none */
    int64_t depth, width;
};

struct penstock_delta;
struct penstock_states;

/* Norms that a layer does not have are 0. A layer with a `delta` is recurrent: `qkv` gives its z as well, behind them,
 * `gates` and `taps` are its own, of `delta` only sizes and weights are given. */
struct penstock_layer {
    struct penstock_projection qkv, output, gate_up, down, gates;
    uintptr_t input_norm, attention_norm, mlp_norm, output_norm, q_norm, k_norm;
    uintptr_t cos, sin, sinks, k_pages, v_pages, taps, states;
    const struct penstock_delta *delta;
    int half, window, group, num_taps, first_unit;
    int product; /* the number of its qkv among the products that adapters may change; the others follow */
};

struct penstock_layers {
    const struct penstock_layer *layers;
    int num, q_heads, kv_heads, head_dim, page_size, activation;
    int has_gate; /* qkv gives gates behind the queries: what attention gives is multiplied by their sigmoid */
    int64_t page_stride, slot_stride;
    float eps, scale, cap;
};

/* Layers 0 … num - 1 over `tokens` of the residual stream, in its place; `update`, of the same shape, is still to be
 * added to it. kv_slots and block_tables: of each group. states: of recurrent layers, but for base and
 * first_unit. runs: adapters. `scratch` has penstock_layers_scratch bytes. -1 if there is no memory for the work, else 0. */
int penstock_run_layers(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens,
                        uintptr_t positions, const uintptr_t *kv_slots, int rows, uintptr_t query_starts,
                        uintptr_t context_lens, const uintptr_t *block_tables, int64_t table_stride,
                        const struct penstock_states *states, uintptr_t residual, uintptr_t update, uintptr_t scratch,
                        int num_runs, const struct penstock_run *runs);
int64_t penstock_layers_scratch(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens);
