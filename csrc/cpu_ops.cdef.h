/* Kernels of the executor for CPU tensors (executor/kernels/cpu_ops.py describes and checks the arguments).
 * Addresses are integers, so that Python passes data_ptr() without a cast; 0 is NULL. Strides count elements. */

/* How a call runs: index of the instruction level, maximum number of threads, 1 for bfloat16 or 0 for float32. */
struct penstock_cpu {
    int level, num_threads, is_bfloat16;
};

/* The vector instructions of a CPU. VNNI and BF16 are separate: Cascade Lake and Ice Lake have only VNNI. */
enum penstock_instructions {
    PENSTOCK_AVX2 = 1,   /* with FMA and F16C */
    PENSTOCK_AVX512 = 2, /* F, BW, DQ and VL */
    PENSTOCK_VNNI = 4,   /* integer dot product of AVX-512 */
    PENSTOCK_BF16 = 8    /* bfloat16 dot product of AVX-512 */
};
int penstock_cpu_instructions(void);
/* Return the highest level that a CPU with these instructions can run; it is the fastest. */
int penstock_cpu_best_level(int instructions);
const char *penstock_cpu_level_name(int level);

/* 1 if torch's OpenMP threads can be used; otherwise everything runs on the calling thread. */
int penstock_cpu_has_team(void);

void penstock_norm(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t residual,
                   int64_t residual_stride, uintptr_t weight, uintptr_t y, uintptr_t total, int64_t rows,
                   int64_t width, float eps);

/* out = activation(gate) * up, in place if out is up. 0: silu, 1: gelu (tanh), 2: clamped swish, 3: sigmoid */
void penstock_gate(const struct penstock_cpu *cpu, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                   int64_t up_stride, uintptr_t out, int64_t rows, int64_t width);

void penstock_rope(const struct penstock_cpu *cpu, int64_t tokens, uintptr_t q, int64_t q_stride, uintptr_t k,
                   int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t cos, uintptr_t sin, int half,
                   uintptr_t positions, uintptr_t kv_slots, uintptr_t q_weight, uintptr_t k_weight, float eps,
                   uintptr_t q_out, uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride,
                   int q_heads, int kv_heads, int head_dim, int page_size);

/* Return -1 if memory cannot be allocated. window 0: none. cap 0: none, else scores are cap * tanh(score / cap).
 * sinks, float32 [q_heads] or 0: a score per head that is part of the softmax but has no value. */
int penstock_attention(const struct penstock_cpu *cpu, int rows, uintptr_t query_starts, uintptr_t context_lens,
                       uintptr_t block_tables, int64_t table_stride, uintptr_t q, int64_t q_stride,
                       uintptr_t k_pages, uintptr_t v_pages, int64_t page_stride, int64_t slot_stride, uintptr_t out,
                       int q_heads, int kv_heads, int head_dim, int page_size, float scale, int window, float cap,
                       uintptr_t sinks);

/* A part of a linear layer, which computes columns [column, column + width) of y from some rows of x. Its weight
 * [width, depth] is quantized, with a type of codes.cdef.h, in panels of penstock_coded_columns(level) rows, or plain
 * (PENSTOCK_NUMBERS), in transposed blocks of penstock_cpu_columns(level) rows, zero beyond `width`. In bfloat16, pairs
 * of neighbours in depth stay together. */
enum penstock_part_type { PENSTOCK_NUMBERS = -1 };
struct penstock_part {
    int type;
    uintptr_t weight, bias;      /* bias: float32, 0: none */
    int64_t column, width;
    int64_t first_row, num_rows; /* -1: all */
};

/* Compute y [rows, width] from x [rows, depth]. `depth` is a multiple of each type's block; for plain bfloat16 weights
 * depth and x_stride are even. `scratch` has penstock_product_scratch bytes. Return -1 without memory, else 0. */
int penstock_product(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t scratch, int num,
                     const struct penstock_part *parts, uintptr_t y, int64_t rows, int64_t depth, int64_t width);
int64_t penstock_product_scratch(int num, const struct penstock_part *parts, int64_t rows, int64_t depth);
int penstock_cpu_columns(int level);
int penstock_coded_columns(int level);

/* Copy rows of a plain weight, given their int64 indices, to y [rows, depth words]. Return -1 if an index is out of
 * range, else 0. */
int penstock_linear_rows(const struct penstock_cpu *cpu, uintptr_t weight, uintptr_t indices, uintptr_t y, int64_t rows,
                         int64_t depth, int64_t width);

/* LoRA adapters of linear layers. Weights are float32 or bfloat16; their rows have a multiple of 16 values.
 * A part of an adapter adds x down[:, first : first + rank] up, with `up` [rank, width], to columns of y. */
struct penstock_adapter_part {
    uintptr_t up;
    int64_t up_stride, first, rank, column, width;
};

/* One LoRA adapter of one linear layer: `down` is [depth, sum of the parts' ranks]. */
struct penstock_adapter {
    uintptr_t down;
    int64_t down_stride; /* at most 768 + 16 */
    int64_t num_weights;
    const struct penstock_adapter_part *parts;
    int num_parts, is_bfloat16; /* num_parts 0: the adapter does not change this layer */
};

/* Adjacent rows with the same adapter, and this adapter for each of the model's linear layers. */
struct penstock_run {
    int64_t first, count;
    const struct penstock_adapter *adapters;
};

/* Add the outputs of the runs' adapters for x [rows, depth] and linear layer `product` to y [rows, width]. */
void penstock_adapt(const struct penstock_cpu *cpu, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride,
                    int64_t depth, int num_runs, const struct penstock_run *runs, int product);

/* All layers of a decoder in one call (executor/kernels/cpu_layers.py). The kernels above run in the order in which a
 * model calls them layer by layer. */
struct penstock_projection {
    const struct penstock_part *parts;
    int num_parts; /* 0: the layer does not have this projection */
    int64_t depth, width;
};

struct penstock_delta;
struct penstock_states;

/* Norms that a layer does not have are 0. A layer with a `delta` is recurrent: its `qkv` projection also outputs z, and
 * it has `gates` and `taps`. Only the sizes and weights of `delta` are set. */
struct penstock_layer {
    struct penstock_projection qkv, output, gate_up, down, gates;
    uintptr_t input_norm, attention_norm, mlp_norm, output_norm, q_norm, k_norm;
    uintptr_t cos, sin, sinks, k_pages, v_pages, taps, states;
    const struct penstock_delta *delta;
    int half, window, group, num_taps, first_unit;
    int product; /* index of qkv among the linear layers that adapters may change; output, gate_up and down follow */
};

struct penstock_layers {
    const struct penstock_layer *layers;
    int num, q_heads, kv_heads, head_dim, page_size, activation;
    int has_gate; /* qkv outputs gates after the queries; attention's output is multiplied by their sigmoid */
    int64_t page_stride, slot_stride;
    float eps, scale, cap;
};

/* Run all layers on the residual stream [tokens, width], in place; the caller adds `update`, the last layer's output.
 * kv_slots and block_tables have one entry per group. states: the recurrent states, except base and first_unit.
 * `scratch` has penstock_layers_scratch bytes. Return -1 if memory cannot be allocated, else 0. */
int penstock_run_layers(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens,
                        uintptr_t positions, const uintptr_t *kv_slots, int rows, uintptr_t query_starts,
                        uintptr_t context_lens, const uintptr_t *block_tables, int64_t table_stride,
                        const struct penstock_states *states, uintptr_t residual, uintptr_t update, uintptr_t scratch,
                        int num_runs, const struct penstock_run *runs);
int64_t penstock_layers_scratch(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens);
