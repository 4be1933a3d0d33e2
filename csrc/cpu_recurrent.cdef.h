/* Recurrent layers for CPU tensors (executor/kernels/recurrent.py, which checks the arguments): addresses and strides
 * as in cpu_ops.cdef.h. A row's results are bitwise independent of how its tokens are divided into chunks. */

/* The location of one layer's recurrent state for the rows of a step. Unit u of the layer is at
 * base + table[row * pages + (first_unit + u) / units_per_page] * page_bytes + (first_unit + u) % units_per_page *
 * unit_bytes: loaded through the table `read` before the row's first token, stored through `write` after its last one;
 * both may be the same table. A row that is_new (an array of bytes) starts with zeros. */
struct penstock_states {
    uintptr_t base, query_starts, read, write, is_new;
    int64_t page_bytes, unit_bytes;
    int first_unit, units_per_page, pages, rows;
};

/* Causal convolution: y [tokens, channels] = each channel's last `taps` inputs times weight [taps, channels] float32,
 * plus bias (float32, 0: none), then optionally silu. Unit 0 holds the previous taps - 1 inputs. x and y must not
 * overlap. */
void penstock_convolve(const struct penstock_cpu *cpu, const struct penstock_states *states, uintptr_t x,
                       int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t channels, int taps,
                       int has_silu);

/* The gated delta rule. A head's state S [key_dim, value_dim] float32 is in unit 1 + head. With q and k of unit length,
 * q also scaled by key_dim^-1/2, decay = exp(rate * softplus(a + shift)) and beta = sigmoid(b), a token computes S =
 * decay S + k (beta (v - decay k S)), and out = norm(q S) * norm_weight * silu(z). Per token, qkv has key_heads
 * queries, key_heads keys, then the values; z has value_heads * value_dim numbers; gates has value_heads numbers b,
 * then value_heads numbers a. Mamba 2 has a skip [value_heads], no norm_weight and no delta term: with unscaled q and k
 * and step = softplus(a + shift), S = exp(rate * step) S + k step v and out = (q S + skip v) * silu(z); gates has only
 * a. */
struct penstock_delta {
    uintptr_t qkv, z, gates, rate, shift, norm_weight, skip, out;
    int64_t qkv_stride, z_stride, gates_stride;
    int key_heads, value_heads, key_dim, value_dim; /* dims up to PENSTOCK_HEAD */
    float eps;
};
void penstock_delta_rule(const struct penstock_cpu *cpu, const struct penstock_states *states,
                         const struct penstock_delta *delta);
