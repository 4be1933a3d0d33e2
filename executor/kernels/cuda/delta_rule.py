"""The gated delta rule in Triton. Single-token rows, and all rows in float32, update their states token by token in one
kernel (`_step`); longer rows are processed in chunks of 64 tokens.

Within a chunk, each token's change depends on those of the earlier tokens through a triangular system, I + L. Its
inverse does not depend on the state, so all chunks of all heads are prepared in parallel (`_prepare`): u, the changes
for a zero state; w, which is multiplied by the state and subtracted from u; and queries, keys and their products,
scaled by decay. Then one program per row, head and 64 state columns loops over the chunks (`_advance`) with four
products each, and `_finish` normalizes and gates. Decay is stored as its logarithm since the start of the chunk. Mamba
2 does not erase: it has no system, the changes are the values, and their factors are folded into keys and products.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.convolution import state_pages, unit_offset
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import block_of
from penstock.executor.kernels.cuda.rows import activate, normalize
from penstock.executor.kernels.cuda.tile_order import find_row
from penstock.executor.kernels.cuda.tiles import power_of_2
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs
from penstock.executor.kernels.state import MAX_SEVERAL

CHUNK_TOKENS = tl.constexpr(64)  # tokens: a warpgroup's product has 64 rows
SUB = tl.constexpr(16)  # tokens of a chunk's diagonal blocks, which are inverted token by token
COLUMNS = 64  # state columns per program; half of them where products read registers
FINISHED = tl.constexpr(16)  # tokens per program of `_finish`


class Sizes(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    erases: bool
    is_padded: bool  # only the device knows which rows are processed in chunks
    qkv_stride: int  # between tokens, like the next two
    z_stride: int
    gate_stride: int

    @staticmethod
    def of(heads: DeltaHeads, inputs: DeltaInputs, is_padded: bool) -> "Sizes":
        assert all(part.stride(1) == 1 for part in inputs)
        return Sizes(*heads[:4], heads.erases, is_padded, *(part.stride(0) for part in inputs))


def delta_rule(
    inputs: DeltaInputs, heads: DeltaHeads, states: StatePages, batch: ForwardBatch, is_fixed: bool = False
) -> Tensor:
    qkv, z, gates = inputs
    tokens, num_heads = len(z), heads.value_heads
    # float32 products would be too slow in chunks. With is_fixed, results must not depend on chunk boundaries.
    is_exact = is_fixed or z.dtype is torch.float32
    is_padded = batch.row_counts is not None and not is_exact
    sizes = Sizes.of(heads, inputs, is_padded)
    counts = batch.query_starts if batch.row_counts is None else batch.row_counts
    # Padding tokens go through the rest of the model, so their output must be finite.
    out = (torch.zeros if is_padded else torch.empty)((tokens, heads.values), dtype=z.dtype, device=z.device)
    norm = heads.norm if heads.skip is None else heads.skip
    assert norm is not None
    pages, table, units = state_pages(states, batch, torch.float32)
    singles, several = batch.num_single_rows, min(len(batch.query_lens), MAX_SEVERAL if is_padded else tokens)
    constants: dict[str, Any] = {"SIZES": sizes, "UNITS": units}
    if rows := len(batch.query_starts) - 1 if is_exact or is_padded else singles:
        wide = power_of_2(heads.key_dim) * power_of_2(heads.value_dim) * z.element_size() >= 1 << 15
        _step[(num_heads, rows)](
            *(qkv, z, gates, heads.rate, heads.shift, norm, out, pages, *table, batch.query_starts, counts),
            *(states.first_unit, heads.eps),
            **constants,
            num_warps=8 if wide else 4,
        )
    if several and not is_exact:
        is_wide, count = current_card().has_wide_products, sum(batch.query_lens)
        columns = min(COLUMNS if is_wide else COLUMNS // 2, block_of(heads.value_dim))

        def room(width: int, dtype: torch.dtype = z.dtype) -> Tensor:
            return torch.empty((tokens, num_heads * width), dtype=dtype, device=z.device)

        u, w = (room(heads.value_dim), room(heads.key_dim)) if heads.erases else (qkv, qkv)
        made, queries, keys = room(heads.value_dim, torch.float32), room(heads.key_dim), room(heads.key_dim)
        prepared = w, queries, keys, room(CHUNK_TOKENS.value), room(1, torch.float32)
        for kind in (True, False) if heads.erases else (False,):  # both at once would not fit into registers
            _prepare[(count // CHUNK_TOKENS.value + several, num_heads)](
                *(qkv, gates, heads.rate, heads.shift, norm, u, *prepared, batch.query_starts, counts),
                *(singles, several),
                SIZES=sizes,
                IS_SOLVED=kind,
                num_warps=8,
            )
        _advance[(num_heads, several, triton.cdiv(heads.value_dim, columns))](
            *(u, *prepared, made, pages, *table, batch.query_starts, counts),
            *(states.first_unit, singles, several),
            **constants,
            COLUMNS=columns,
            num_warps=4 if is_wide else 8,
            num_stages=2 if is_wide else 1,
        )
        _finish[(triton.cdiv(count, FINISHED.value), num_heads)](
            *(made, z, norm, out, batch.query_starts, counts), *(singles, several, heads.eps), SIZES=sizes, num_warps=4
        )
    return out


@triton.jit
def scale_to_length(x, scale):
    """Scale each row of x (or all of x, if it is one row) to the length `scale`."""
    return x * (scale / tl.sqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) + 1e-6))


@triton.jit
def softplus(a, shift):
    """Return log(1 + exp(a + shift)) in float32. A NaN stays one: it must not become the softplus of 20."""
    x = a.to(tl.float32) + shift
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))))


@triton.jit
def several_rows(counts_ptr, first, num_rows, SIZES: tl.constexpr):
    """Return the first row that is processed in chunks, and the end of these rows; in a graph only the device knows."""
    end = first + num_rows
    if SIZES.is_padded:
        first = tl.load(counts_ptr + 1)
        end = tl.load(counts_ptr)
    return first, end


@kernel
def _step(
    qkv_ptr,
    z_ptr,
    gates_ptr,
    rate_ptr,
    shift_ptr,
    norm_ptr,
    out_ptr,
    pages_ptr,
    read_ptr,
    write_ptr,
    is_new_ptr,
    starts_ptr,
    counts_ptr,
    first_unit,
    eps,
    SIZES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Process one head of one row, token by token."""
    head, row = tl.program_id(0), tl.program_id(1)
    if SIZES.is_padded:
        if row >= tl.load(counts_ptr + 1):
            return
    SCALE: tl.constexpr = SIZES.key_dim**-0.5
    i = tl.arange(0, triton.next_power_of_2(SIZES.key_dim))
    j = tl.arange(0, triton.next_power_of_2(SIZES.value_dim))
    is_i, is_j = i < SIZES.key_dim, j < SIZES.value_dim
    inside = is_i[:, None] & is_j[None, :]
    place = i[:, None] * SIZES.value_dim + j[None, :]
    has_state = tl.load(is_new_ptr + row) == 0
    state_ptr = pages_ptr + unit_offset(read_ptr, row, first_unit + 1 + head, UNITS)
    state = tl.load(state_ptr + place, mask=inside & has_state, other=0.0)
    rate, shift = tl.load(rate_ptr + head), tl.load(shift_ptr + head)
    norm = tl.load(norm_ptr + j, mask=is_j, other=0.0) if SIZES.erases else tl.load(norm_ptr + head)
    keys: tl.constexpr = SIZES.key_heads * SIZES.key_dim
    key_ptr = qkv_ptr + head // (SIZES.value_heads // SIZES.key_heads) * SIZES.key_dim + i
    for number in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        token = tl.cast(number, tl.int64)
        at = token * SIZES.qkv_stride
        q = tl.load(key_ptr + at, mask=is_i, other=0.0).to(tl.float32)
        k = tl.load(key_ptr + at + keys, mask=is_i, other=0.0).to(tl.float32)
        v = tl.load(qkv_ptr + at + 2 * keys + head * SIZES.value_dim + j, mask=is_j, other=0.0).to(tl.float32)
        gate_ptr = gates_ptr + token * SIZES.gate_stride + head
        if SIZES.erases:
            q, k = scale_to_length(q, SCALE), scale_to_length(k, 1.0)
            state *= tl.exp(rate * softplus(tl.load(gate_ptr + SIZES.value_heads), shift))
            change = tl.sigmoid(tl.load(gate_ptr).to(tl.float32)) * (v - tl.sum(k[:, None] * state, 0))
        else:
            step = softplus(tl.load(gate_ptr), shift)
            state *= tl.exp(rate * step)
            change = step * v
        state += k[:, None] * change[None, :]
        y = tl.sum(q[:, None] * state, 0)
        y = normalize(y, norm, eps, SIZES.value_dim) if SIZES.erases else y + norm * v
        z = tl.load(z_ptr + token * SIZES.z_stride + head * SIZES.value_dim + j, mask=is_j, other=0.0).to(tl.float32)
        out = out_ptr + token * (SIZES.value_heads * SIZES.value_dim) + head * SIZES.value_dim + j
        tl.store(out, (y * activate(z, "silu")).to(out_ptr.dtype.element_ty), mask=is_j)
    kept_ptr = pages_ptr + unit_offset(write_ptr, row, first_unit + 1 + head, UNITS)
    tl.store(kept_ptr + place, state, mask=inside)


@triton.jit
def inverse(lower):
    """Return the inverse of I + lower, where lower [CHUNK_TOKENS, CHUNK_TOKENS] is strictly lower triangular.

    The diagonal blocks are inverted token by token, all in parallel, to D. With M = D · (lower without these blocks),
    whose fourth power is zero, the result is (I + M)⁻¹ D = (I - M) (I + M²) D. Powers of `lower` may be huge.
    """
    PIECES: tl.constexpr = CHUNK_TOKENS // SUB
    piece, one = tl.arange(0, PIECES), tl.arange(0, SUB)
    is_diagonal = (piece[:, None] == piece[None, :])[:, None, :, None]
    apart = tl.reshape(lower, (PIECES, SUB, PIECES, SUB))
    own = tl.sum(tl.where(is_diagonal, apart, 0.0), 2)  # [PIECES, SUB, SUB]
    solved = tl.where((one[:, None] == one[None, :])[None, :, :], 1.0, own * 0.0)
    for token in range(1, SUB):
        is_token = (one == token)[None, :, None]
        row = tl.sum(tl.where(is_token, own, 0.0), 1)  # [PIECES, SUB]
        solved -= tl.where(is_token, tl.sum(row[:, :, None] * solved, 1)[:, None, :], 0.0)
    diagonal = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), (CHUNK_TOKENS, CHUNK_TOKENS))
    number = tl.arange(0, CHUNK_TOKENS)
    rest = tl.where((number[:, None] // SUB) == (number[None, :] // SUB), 0.0, lower)
    identity = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
    m = tl.dot(diagonal, rest, input_precision="tf32")
    both = tl.dot(identity - m, identity + tl.dot(m, m, input_precision="tf32"), input_precision="tf32")
    return tl.dot(both, diagonal, input_precision="tf32")


@kernel
def _prepare(
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    shift_ptr,
    skip_ptr,
    u_ptr,
    w_ptr,
    queries_ptr,
    keys_ptr,
    scores_ptr,
    left_ptr,
    starts_ptr,
    counts_ptr,
    first_row,
    num_rows,
    SIZES: tl.constexpr,
    IS_SOLVED: tl.constexpr,
):
    """Prepare one head's chunk for `_advance`: u and w if IS_SOLVED, else all other inputs."""
    head = tl.program_id(1)
    first_row, end_row = several_rows(counts_ptr, first_row, num_rows, SIZES)
    row, tile = find_row(tl.program_id(0), starts_ptr, first_row, end_row - first_row, 1, CHUNK_TOKENS)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    if tile * CHUNK_TOKENS >= count:
        return
    number = tl.arange(0, CHUNK_TOKENS)
    i, j = tl.arange(0, block_of(SIZES.key_dim)), tl.arange(0, block_of(SIZES.value_dim))
    is_token = tile * CHUNK_TOKENS + number < count
    token = (begin + tile * CHUNK_TOKENS + number).to(tl.int64)
    keys: tl.constexpr = SIZES.key_heads * SIZES.key_dim
    qkv_ptr += token[:, None] * SIZES.qkv_stride
    q_ptrs = qkv_ptr + head // (SIZES.value_heads // SIZES.key_heads) * SIZES.key_dim + i[None, :]
    is_k, is_v = is_token[:, None] & (i < SIZES.key_dim)[None, :], is_token[:, None] & (j < SIZES.value_dim)[None, :]
    gate = token * SIZES.gate_stride + head
    b = tl.load(gates_ptr + gate, mask=is_token, other=0.0)
    a = tl.load(gates_ptr + gate + SIZES.value_heads, mask=is_token, other=0.0) if SIZES.erases else b
    step = softplus(a, tl.load(shift_ptr + head))
    beta = tl.sigmoid(b.to(tl.float32)) if SIZES.erases else step
    decay = tl.where(is_token, tl.load(rate_ptr + head) * step, 0.0)
    left = tl.cumsum(decay, 0)
    vector = token * SIZES.value_heads + head
    dtype = u_ptr.dtype.element_ty
    place = vector[:, None] * SIZES.key_dim + i[None, :]
    k = tl.load(q_ptrs + keys, mask=is_k, other=0.0).to(tl.float32)
    if SIZES.erases:
        k = scale_to_length(k, 1.0)
    is_past = number[:, None] >= number[None, :]
    since = tl.where(is_past, tl.exp(tl.where(is_past, left[:, None] - left[None, :], 0.0)), 0.0)
    if IS_SOLVED:
        lower = tl.dot(k.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee") * since * beta[:, None]
        solved = inverse(tl.where(number[:, None] > number[None, :], lower, 0.0)).to(dtype)
        w = tl.dot(solved, (k * (beta * tl.exp(left))[:, None]).to(dtype), input_precision="ieee")
        tl.store(w_ptr + place, w.to(dtype), mask=is_k)
        v = tl.load(qkv_ptr + 2 * keys + head * SIZES.value_dim + j[None, :], mask=is_v, other=0.0).to(tl.float32)
        u = tl.dot(solved, (v * beta[:, None]).to(dtype), input_precision="ieee")
        tl.store(u_ptr + vector[:, None] * SIZES.value_dim + j[None, :], u.to(dtype), mask=is_v)
    else:
        SCALE: tl.constexpr = SIZES.key_dim**-0.5
        q = tl.load(q_ptrs, mask=is_k, other=0.0).to(tl.float32)
        if SIZES.erases:
            q = scale_to_length(q, SCALE)
        tl.store(queries_ptr + place, (q * tl.exp(left)[:, None]).to(dtype), mask=is_k)
        remains = tl.exp(tl.sum(decay, 0) - left)
        scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee") * since
        if not SIZES.erases:
            remains *= beta
            own = tl.where(number[:, None] == number[None, :], tl.load(skip_ptr + head), 0.0)
            scores = scores * beta[None, :] + own
        tl.store(keys_ptr + place, (k * remains[:, None]).to(dtype), mask=is_k)
        tl.store(
            scores_ptr + vector[:, None] * CHUNK_TOKENS + number[None, :], scores.to(dtype), mask=is_token[:, None]
        )
        tl.store(left_ptr + vector, left, mask=is_token)


@kernel
def _advance(
    u_ptr,
    w_ptr,
    queries_ptr,
    keys_ptr,
    scores_ptr,
    left_ptr,
    made_ptr,
    pages_ptr,
    read_ptr,
    write_ptr,
    is_new_ptr,
    starts_ptr,
    counts_ptr,
    first_unit,
    first_row,
    num_rows,
    SIZES: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Update some columns of one head's state, chunk by chunk of its row."""
    first_row, end_row = several_rows(counts_ptr, first_row, num_rows, SIZES)
    head, row = tl.program_id(0), first_row + tl.program_id(1)
    if row >= end_row:
        return
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    number = tl.arange(0, CHUNK_TOKENS)
    i = tl.arange(0, block_of(SIZES.key_dim))
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_i, is_j = i < SIZES.key_dim, j < SIZES.value_dim
    inside = is_i[:, None] & is_j[None, :]
    place = i[:, None] * SIZES.value_dim + j[None, :]
    has_state = tl.load(is_new_ptr + row) == 0
    state_ptr = pages_ptr + unit_offset(read_ptr, row, first_unit + 1 + head, UNITS)
    state = tl.load(state_ptr + place, mask=inside & has_state, other=0.0)
    dtype = u_ptr.dtype.element_ty
    for start in range(0, count, CHUNK_TOKENS):
        is_token = start + number < count
        vector = (begin + start + number).to(tl.int64) * SIZES.value_heads + head
        is_k, is_v = is_token[:, None] & is_i[None, :], is_token[:, None] & is_j[None, :]
        at = vector[:, None] * SIZES.key_dim + i[None, :]
        values = vector[:, None] * SIZES.value_dim + j[None, :]
        before = state.to(dtype)
        if SIZES.erases:
            change = tl.load(u_ptr + values, mask=is_v, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + at, mask=is_k, other=0.0)
            change = (change - tl.dot(w, before, input_precision="ieee")).to(dtype)
        else:
            token = (begin + start + number).to(tl.int64)[:, None] * SIZES.qkv_stride
            first: tl.constexpr = 2 * SIZES.key_heads * SIZES.key_dim
            change = tl.load(u_ptr + token + first + head * SIZES.value_dim + j[None, :], mask=is_v, other=0.0)
        out = tl.dot(tl.load(queries_ptr + at, mask=is_k, other=0.0), before, input_precision="ieee")
        scores = tl.load(
            scores_ptr + vector[:, None] * CHUNK_TOKENS + number[None, :], mask=is_token[:, None], other=0.0
        )
        out = tl.dot(scores, change, out, input_precision="ieee")
        tl.store(made_ptr + values, out, mask=is_v)
        last = (begin + tl.minimum(start + CHUNK_TOKENS, count) - 1).to(tl.int64) * SIZES.value_heads + head
        k = tl.load(keys_ptr + at, mask=is_k, other=0.0)
        state = tl.dot(tl.trans(k), change, state * tl.exp(tl.load(left_ptr + last)), input_precision="ieee")
    kept_ptr = pages_ptr + unit_offset(write_ptr, row, first_unit + 1 + head, UNITS)
    tl.store(kept_ptr + place, state, mask=inside)


@kernel
def _finish(made_ptr, z_ptr, norm_ptr, out_ptr, starts_ptr, counts_ptr, first_row, num_rows, eps, SIZES: tl.constexpr):
    """Normalize and gate one head of FINISHED tokens."""
    head = tl.program_id(1)
    first_row, end_row = several_rows(counts_ptr, first_row, num_rows, SIZES)
    first, end = tl.load(starts_ptr + first_row), tl.load(starts_ptr + end_row)
    token = (first + tl.program_id(0) * FINISHED + tl.arange(0, FINISHED)).to(tl.int64)[:, None]
    j = tl.arange(0, triton.next_power_of_2(SIZES.value_dim))[None, :]
    inside = (token < end) & (j < SIZES.value_dim)
    place = token * (SIZES.value_heads * SIZES.value_dim) + head * SIZES.value_dim + j
    made = tl.load(made_ptr + place, mask=inside, other=0.0)
    y = made
    if SIZES.erases:
        y = normalize(made, tl.load(norm_ptr + j, mask=j < SIZES.value_dim, other=0.0), eps, SIZES.value_dim)
    z = tl.load(z_ptr + token * SIZES.z_stride + head * SIZES.value_dim + j, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (y * activate(z, "silu")).to(out_ptr.dtype.element_ty), mask=inside)
