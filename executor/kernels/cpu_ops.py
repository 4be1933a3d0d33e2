"""Implements `Ops` for CPU tensors with C kernels (csrc/cpu_*.c).

They run on torch's OpenMP threads and use the best vector instructions of the CPU. A token's result is bitwise the same
for any batch, any chunking of its prompt, and any number of threads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import _csrc
from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels import NO_EXTRAS, Activation, KeyStore, LatentStore, NormedRows, Pages, Rows, ScoreExtras
from penstock.executor.kernels.recurrent import (
    DeltaHeads,
    DeltaInputs,
    check_heads,
    check_taps,
    describe_heads,
    describe_states,
)
from penstock.executor.kernels.weight import Weight
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.protocol import ExecutorError

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swish", "sigmoid")  # the index is the number in C


def make_ops(dtype: torch.dtype, head_dim: int, num_threads: int | None = None, level: str | None = None) -> "CpuOps":
    """Return kernels for a model in `dtype` with heads of `head_dim`, on at most `num_threads` threads (None: torch's).

    `level` names the vector instructions to use (see `levels`); None is the best that the CPU has.
    """
    if dtype not in DTYPES or head_dim % 2:
        raise ExecutorError(
            f"a CPU computes in float32 and bfloat16, with heads of an even size; this model has {dtype} and {head_dim}"
        )
    return CpuOps(dtype, describe_cpu(dtype, num_threads, level))


def levels() -> list[str]:
    """Return the instruction levels that this CPU can run, slowest first."""
    best = _csrc.lib.penstock_cpu_best_level(_csrc.lib.penstock_cpu_instructions())
    return [_csrc.ffi.string(_csrc.lib.penstock_cpu_level_name(i)).decode() for i in range(best + 1)]


def describe_cpu(dtype: torch.dtype, num_threads: int | None, level: str | None) -> Any:
    """Return the struct of level, threads and dtype that C functions take first; None has the meaning of `make_ops`."""
    names = levels()
    if level is not None and level not in names:
        raise ValueError(f"level: {level!r} is not one of {names} on this CPU")
    fields = names.index(level or names[-1]), num_threads or torch.get_num_threads(), dtype is torch.bfloat16
    return _csrc.ffi.new("struct penstock_cpu *", fields)


class CpuOps:
    """Calls the C kernels, at 2 to 3 µs of Python each, with the fields of their structs (csrc/cpu_ops.cdef.h) as a list
    of one tuple. Only asserts its arguments; sizes were checked at startup."""

    expanded_attention = wide_linear = fused_experts = blocks = None
    has_packed = False
    max_normed_rows = max_plain_rows = 0

    def __init__(self, dtype: torch.dtype, cpu: Any) -> None:
        self.dtype, self.cpu = dtype, cpu
        self._lib: Any = _csrc.lib

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)  # contiguous also where x is a slice of wider rows
        self._norm(x, None, weight, y, None, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert residual.dtype is self.dtype
        y, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(x, residual, weight, y, total, eps)
        return y, total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float
    ) -> None:
        assert x.dtype is self.dtype and weight.dtype is torch.float32 and weight.shape == x.shape[1:]
        strides = _row_stride(x), 0 if residual is None else _row_stride(residual)
        self._lib.penstock_norm(self.cpu, [(*addresses(x, residual, weight, y, total), *strides, *x.shape, eps)])

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, 1)
        return self._gated(gate, up, activation)

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._gated(gate, x, "sigmoid")

    def _gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        assert gate.dtype is up.dtype is self.dtype
        out = torch.empty(up.shape, dtype=self.dtype)
        sizes = _row_stride(gate), _row_stride(up), *up.shape
        self._lib.penstock_gate(self.cpu, [(*addresses(gate, up, out), *sizes, ACTIVATIONS.index(activation))])
        return out

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor) and weight.is_numbers
        return F.linear(x, weight.codes, bias)

    def gated_linear(self, x: Tensor | NormedRows, weight: Weight, activation: Activation) -> Tensor:
        return self.gate(self.linear(x, weight), activation)

    @staticmethod
    def choose_experts(logits: Tensor, bias: Tensor | None, moe: MoeSpec, num_shared: int = 0) -> tuple[Tensor, Tensor]:
        scores = logits[:, : moe.num_experts]
        # torch's sigmoid computes the last numbers of a tensor differently, so its bits would depend on the batch.
        scores = scores.softmax(-1) if moe.scoring == "softmax" else (1 + (-scores).exp()).reciprocal()
        wanted = scores if bias is None else scores + bias  # the bias affects only the choice, not the weights
        if moe.num_groups > 1:
            grouped = wanted.unflatten(-1, (moe.num_groups, -1))
            # The score of a group is its best expert's, or with a bias the sum of its best two.
            best = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
            chosen = best.topk(moe.top_groups, dim=-1).indices
            outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            wanted = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
        ids = wanted.topk(moe.top_k, dim=-1).indices
        shares = scores.gather(1, ids)
        if moe.renormalize:
            shares = shares / (shares.sum(-1, keepdim=True) + moe.renormalize_eps)
        shares = shares * moe.scale
        if num_shared:
            always = moe.num_experts + torch.arange(num_shared, device=ids.device)
            share = logits[:, moe.num_experts :].sigmoid() if moe.has_shared_gate else shares.new_ones(1, 1)
            ids = torch.cat((ids, always.expand(len(ids), -1)), dim=1)
            shares = torch.cat((shares, share.expand(len(ids), num_shared)), dim=1)
        return ids.int(), shares

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor | None, store: KeyStore) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        (cos, sin, positions), (k_pages, v_pages), kv_cells, (q_weight, k_weight, eps) = store
        page_stride, cell_stride, _ = k_pages.stride()
        assert q.dtype is k_pages.dtype is self.dtype and v_pages.stride() == (page_stride, cell_stride, 1)
        assert positions.dtype is torch.int32 and kv_cells.dtype is torch.int64 and cos.dtype is torch.float32
        rotated = torch.empty_like(q)
        strides = _head_stride(q), _head_stride(k), 0 if v is None else _head_stride(v), page_stride, cell_stride
        sizes = q_heads, k.shape[1], head_dim, cos.shape[1], k_pages.shape[1]
        tensors = addresses(q, k, v, cos, sin, positions, kv_cells, q_weight, k_weight, rotated, k_pages, v_pages)
        self._lib.penstock_rope(self.cpu, [(*tensors, *strides, tokens, *sizes, eps)])
        return rotated

    def latent_rope_and_store(
        self, goal: Tensor, q: Tensor, down: Tensor, store: LatentStore, first: int, is_whole: bool
    ) -> None:
        """Implement `Ops`, but without `is_whole`: no attention on a CPU needs whole queries."""
        rope_dim = 2 * store.rotation.cos.shape[1]
        assert len(goal) == len(q) and first == 0 and not is_whole
        rotating, key = latent_parts(self.rms_norm, q, down, store)
        given = KeyStore(store.rotation, (store.pages, store.pages), store.kv_cells)
        self.rope_and_store(key[:, :0], key, None, given)
        goal[..., :rope_dim] = self.rope_and_store(rotating, rotating[:, :0], None, given)

    def paged_attention(
        self, q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
    ) -> Tensor:
        (tokens, q_heads, head_dim), (k_pages, v_pages) = q.shape, pages
        _, page_size, kv_width = k_pages.shape
        page_stride, cell_stride, _ = k_pages.stride()
        assert q.dtype is k_pages.dtype is self.dtype and v_pages.stride() == (page_stride, cell_stride, 1)
        assert scale > 0  # the largest score is found before it is scaled
        tables = batch.block_tables
        out = torch.empty_like(q)
        tensors = q, k_pages, v_pages, out, batch.query_starts, batch.context_lens, tables, extras.sinks
        strides = _head_stride(q), page_stride, cell_stride, tables.stride(0)
        sizes = tables.shape[0], q_heads, kv_width // head_dim, head_dim, page_size, extras.window or 0
        given = *addresses(*tensors), *strides, *sizes, scale, extras.cap or 0.0
        failed = self._lib.penstock_attention(self.cpu, [given])
        if failed:
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return out

    def latent_attention(self, q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
        return self.paged_attention(q, (latents, latents), batch, scale)[..., rope_dim:]

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: StatePages, batch: ForwardBatch, has_silu: bool
    ) -> Tensor:
        assert x.dtype is self.dtype and x.stride(1) == 1
        check_taps(weight, states, self.dtype)
        taps, channels = weight.shape
        y = torch.empty((len(x), channels), dtype=self.dtype)
        located = describe_states(states, batch)
        sizes = x.stride(0), channels, taps, has_silu
        self._lib.penstock_convolve(self.cpu, [(located, *addresses(x, weight, bias, y), *sizes)])
        return y

    def delta_rule(self, inputs: DeltaInputs, heads: DeltaHeads, states: StatePages, batch: ForwardBatch) -> Tensor:
        assert all(part.dtype is self.dtype and part.stride(1) == 1 for part in inputs)
        check_heads(heads, states)
        delta, out = describe_heads(heads), torch.empty((len(inputs.z), heads.values), dtype=self.dtype)
        located = describe_states(states, batch)  # this name keeps the struct alive
        delta.out, delta.states = out.data_ptr(), located
        for name, part in zip(("qkv", "z", "gates"), inputs, strict=True):
            setattr(delta, name, part.data_ptr())
            setattr(delta, f"{name}_stride", part.stride(0))
        self._lib.penstock_delta_rule(self.cpu, delta)
        return out


def addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _row_stride(x: Tensor) -> int:
    """Return the stride of the rows of x [T, H], each of which must be contiguous."""
    row, element = x.stride()
    assert element == 1 or x.shape[1] == 1
    return row


def _head_stride(x: Tensor) -> int:
    """Return the stride of the tokens of x [T, heads, D], whose heads must be contiguous."""
    token, head, element = x.stride()
    assert element == 1 and (head == x.shape[2] or x.shape[1] == 1)
    return token


def latent_parts(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor], q: Tensor, down: Tensor, store: LatentStore
) -> tuple[Tensor, Tensor]:
    """Return the rope part of the queries [T, H, rope] and the keys [T, 1, rope + rank], both before rotation.

    The checkpoint rotates pairs (2i, 2i + 1), our kernels pairs (i, i + half), so queries and keys are both permuted.
    """
    rope_dim = 2 * store.rotation.cos.shape[1]
    latent, rotating = down[:, :-rope_dim], down[:, -rope_dim:]
    key = torch.cat((_pairs_apart(rotating), rms_norm(latent, *store.norm)), dim=-1)
    return _pairs_apart(q[..., -rope_dim:]), key[:, None]


def _pairs_apart(x: Tensor) -> Tensor:
    apart: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apart
