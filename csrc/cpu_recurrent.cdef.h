/* Recurrent layers for CPU tensors (executor/kernels/recurrent.py, which checks the arguments): addresses and strides
 * as in cpu_ops.cdef.h. A row's numbers are the same bits in whatever pieces its tokens come. */

/* Where the rows of a step keep what one layer carries along. Unit u of the layer is at
 * base + table[row * pages + (first_unit + u) / units_per_page] * page_bytes + (first_unit + u) % units_per_page *
 * unit_bytes, by the table `read` before the row's first token and by `write` after its last one; they may be the same.
 * A row that is_new (bytes) begins with zeros. */
struct penstock_states {
    uintptr_t base, query_starts, read, write, is_new;
    int64_t page_bytes, unit_bytes;
    int first_unit, units_per_page, pages, rows;
};

/* y [tokens, channels]: each channel's last `taps` inputs by weight [taps, channels] float32, plus bias (float32, 0:
 * none), through silu if asked. Unit 0 has the taps - 1 inputs before. x and y must not overlap. */
void penstock_convolve(const struct penstock_cpu *cpu, const struct penstock_states *states, uintptr_t x,
                       int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t channels, int taps,
                       int has_silu);

/* The gated delta rule. A head keeps S [key_dim, value_dim] float32 in unit 1 + head. With q and k of unit length, q
 * also scaled by key_dim^-1/2, decay = exp(rate * softplus(a + shift)) and beta = sigmoid(b), a token makes
 * S = decay S + k (beta (v - decay k S)), and out = norm(q S) * norm_weight * silu(z).
 * qkv: key_heads queries, as many keys, then values of a token side by side; z: value_heads * value_dim of it; gates:
 * value_heads numbers b, then as many a.
 * Mamba 2, with a skip [value_heads] and no norm_weight, does not erase what a key had: with q and k as they are and
 * step = softplus(a + shift), S = exp(rate * step) S + k step v, and out = (q S + skip v) * silu(z); gates are a alone. */
struct penstock_delta {
    uintptr_t qkv, z, gates, rate, shift, norm_weight, skip, out;
    int64_t qkv_stride, z_stride, gates_stride;
    int key_heads, value_heads, key_dim, value_dim; /* dims up to PENSTOCK_HEAD */
    float eps;
};
void penstock_delta_rule(const struct penstock_cpu *cpu, const struct penstock_states *states,
                         const struct penstock_delta *delta);
