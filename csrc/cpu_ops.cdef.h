/* Kernels of the executor for CPU tensors (executor/kernels/cpu_ops.py describes and checks the arguments).
 * The types of addresses are in addresses.h. */

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

/* Each kernel takes a struct with its arguments. Strides count elements; outputs are contiguous unless they have one. */

/* y = norm(x) * weight; with `residual`, x + residual is normed and also stored in `total`. */
struct penstock_norm {
    inputs x, residual; /* residual NULL: none */
    floats weight;
    outputs y, total;
    int64_t x_stride, residual_stride, rows, width;
    float eps;
};
void penstock_norm(const struct penstock_cpu *cpu, const struct penstock_norm *norm);

/* out = activation(gate) * up, in place if out is up. 0: silu, 1: gelu (tanh), 2: clamped swish, 3: sigmoid */
struct penstock_gate {
    inputs gate, up;
    outputs out;
    int64_t gate_stride, up_stride, rows, width;
    int activation;
};
void penstock_gate(const struct penstock_cpu *cpu, const struct penstock_gate *gate);

/* Rotate queries and keys, after a norm of each head if there are weights, and store keys and values in the pages. */
struct penstock_rope {
    inputs q, k, v; /* heads are adjacent; v NULL: there are no values to store */
    floats cos, sin; /* [positions, half] */
    int32s positions;
    int64s kv_slots;
    floats q_weight, k_weight; /* NULL: no norm */
    outputs q_out, k_pages, v_pages;
    int64_t q_stride, k_stride, v_stride, page_stride, slot_stride, tokens;
    int q_heads, kv_heads, head_dim, half, page_size;
    float eps;
};
void penstock_rope(const struct penstock_cpu *cpu, const struct penstock_rope *rope);

/* Attention of the tokens [query_starts[row], query_starts[row + 1]) of each row over its pages. */
struct penstock_attention {
    inputs q, k_pages, v_pages;
    outputs out;
    int32s query_starts, context_lens, block_tables;
    floats sinks; /* [q_heads]: attention sinks, scores of a position without a value; NULL: none */
    int64_t q_stride, page_stride, slot_stride, table_stride;
    int rows, q_heads, kv_heads, head_dim, page_size;
    int window; /* positions that a query attends to, its own included; 0: all */
    float scale, cap; /* cap 0: none, else scores are cap * tanh(score / cap) */
};
/* Return -1 if memory cannot be allocated, else 0. */
int penstock_attention(const struct penstock_cpu *cpu, const struct penstock_attention *attention);

/* A part of a linear layer, which computes columns [column, column + width) of y from some rows of x. Its weight
 * [width, depth] is quantized, with a type of codes.cdef.h, in panels of penstock_coded_columns(level) rows, or plain
 * (PENSTOCK_NUMBERS), in transposed blocks of penstock_cpu_columns(level) rows, zero beyond `width`. In bfloat16, pairs
 * of neighbours in depth stay together, as in a weight that is bfloat16 where x is float32 (PENSTOCK_PAIRS). */
enum penstock_part_type { PENSTOCK_NUMBERS = -1, PENSTOCK_PAIRS = -2 };
struct penstock_part {
    int type;
    inputs weight;
    floats bias; /* NULL: none */
    int64_t column, width;
    int64_t first_row, num_rows; /* -1: all */
    int64_t input, depth; /* of a plain weight: reads columns [input, input + depth) of x; depth 0: all */
};

/* y [rows, width] = x [rows, depth] weights. `depth` is a multiple of each type's block; for plain bfloat16 weights
 * each depth, x_stride and `input` are even. */
struct penstock_product {
    inputs x;
    outputs scratch, y; /* scratch: penstock_product_scratch bytes */
    const struct penstock_part *parts;
    int num_parts;
    int64_t x_stride, rows, depth, width;
    int adds; /* add to y; all weights are plain */
};
/* Return -1 without memory, else 0. */
int penstock_product(const struct penstock_cpu *cpu, const struct penstock_product *product);
int64_t penstock_product_scratch(int num, const struct penstock_part *parts, int64_t rows, int64_t depth);
int penstock_cpu_columns(int level);
int penstock_coded_columns(int level);

/* Copy rows of a plain weight [width, depth words], given their indices, to y [rows, depth words]. Return -1 if an index
 * is out of range, else 0. */
struct penstock_rows {
    inputs weight;
    int64s indices;
    outputs y;
    int64_t rows, depth, width;
};
int penstock_linear_rows(const struct penstock_cpu *cpu, const struct penstock_rows *rows);

/* One LoRA adapter of one linear layer. Each of `ups` adds the product of some columns of x down to columns of y. */
struct penstock_adapter {
    struct penstock_part down;
    const struct penstock_part *ups;
    int num_ups; /* 0: the adapter does not change this layer */
};

/* Adjacent rows with the same adapter, and this adapter for each of the model's linear layers. */
struct penstock_run {
    int64_t first, count;
    const struct penstock_adapter *adapters;
};

/* Add the outputs of the runs' adapters for x [rows, depth] and linear layer `product` to y. */
struct penstock_adapt {
    inputs x;
    outputs y;
    const struct penstock_run *runs;
    int64_t x_stride, y_stride, depth;
    int num_runs, product;
};
/* Return -1 without memory, else 0. */
int penstock_adapt(const struct penstock_cpu *cpu, const struct penstock_adapt *adapt);

/* The location of one layer's recurrent state for the rows of a step. Unit u of the layer is at
 * base + table[row * pages + (first_unit + u) / units_per_page] * page_bytes + (first_unit + u) % units_per_page *
 * unit_bytes: loaded through the table `read` before the row's first token, stored through `write` after its last one;
 * both may be the same table. A row that is_new starts with zeros. */
struct penstock_states {
    outputs base;
    int32s query_starts, read, write;
    uint8s is_new;
    int64_t page_bytes, unit_bytes;
    int first_unit, units_per_page, pages, rows;
};

/* Causal convolution: y [tokens, channels] = each channel's last `taps` inputs times weight [taps, channels], plus bias,
 * then optionally silu. Unit 0 holds the previous taps - 1 inputs. x and y must not overlap. */
struct penstock_convolution {
    const struct penstock_states *states;
    inputs x;
    floats weight, bias; /* bias NULL: none */
    outputs y;
    int64_t x_stride, channels;
    int taps, has_silu;
};
void penstock_convolve(const struct penstock_cpu *cpu, const struct penstock_convolution *convolution);

/* The gated delta rule. A head's state S [key_dim, value_dim] float32 is in unit 1 + head. With q and k of unit length,
 * q also scaled by key_dim^-1/2, decay = exp(rate * softplus(a + shift)) and beta = sigmoid(b), a token computes S =
 * decay S + k (beta (v - decay k S)), and out = norm(q S) * norm_weight * silu(z). Per token, qkv has key_heads
 * queries, key_heads keys, then the values; z has value_heads * value_dim numbers; gates has value_heads numbers b,
 * then value_heads numbers a. Mamba 2 has a skip [value_heads], no norm_weight and no delta term: with unscaled q and k
 * and step = softplus(a + shift), S = exp(rate * step) S + k step v and out = (q S + skip v) * silu(z); gates has only
 * a. A row's results are bitwise independent of how its tokens are divided into chunks. */
struct penstock_delta {
    const struct penstock_states *states;
    inputs qkv, z, gates;
    floats rate, shift, norm_weight, skip;
    outputs out;
    int64_t qkv_stride, z_stride, gates_stride;
    int key_heads, value_heads, key_dim, value_dim; /* dims up to PENSTOCK_HEAD */
    float eps;
};
void penstock_delta_rule(const struct penstock_cpu *cpu, const struct penstock_delta *delta);

/* All layers of a decoder in one call (executor/kernels/cpu_layers.py). The kernels above run in the order in which a
 * model calls them layer by layer. */
struct penstock_projection {
    const struct penstock_part *parts;
    int num_parts; /* 0: the layer does not have this projection */
    int64_t depth, width;
};

/* Norms that a layer does not have are NULL. A layer with a `delta` is recurrent: its `qkv` projection also outputs z, and
 * it has `gates` and `taps`. Only the sizes and weights of `delta` are set. */
struct penstock_layer {
    struct penstock_projection qkv, output, gate_up, down, gates;
    floats input_norm, attention_norm, mlp_norm, output_norm, q_norm, k_norm, cos, sin, sinks, taps;
    outputs k_pages, v_pages, states;
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

/* One step of all layers on the residual stream [tokens, width], in place; the caller adds `update`, the last layer's
 * output. `scratch` has penstock_layers_scratch bytes. */
struct penstock_step {
    const struct penstock_layers *layers;
    const int64s *kv_slots; /* one for each group of layers */
    const int32s *block_tables;
    const struct penstock_states *states; /* except base and first_unit, which are a layer's; NULL: no layer has one */
    const struct penstock_run *runs;
    int32s positions, query_starts, context_lens;
    outputs residual, update, scratch;
    int64_t tokens, table_stride;
    int rows, num_runs;
};
/* Return -1 if memory cannot be allocated, else 0. */
int penstock_run_layers(const struct penstock_cpu *cpu, const struct penstock_step *step);
int64_t penstock_layers_scratch(const struct penstock_cpu *cpu, const struct penstock_layers *layers, int64_t tokens);
