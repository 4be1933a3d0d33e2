"""The kernels in C for CPU tensors (csrc/cpu_*.c), behind the signatures of `Ops`.

They run on torch's own OpenMP threads, on whatever vector instructions the CPU has. A token's result is the same
bits whatever else is in the batch, however its prompt is cut into chunks, and with any number of threads.
`make_ops` decides once, from dtype and head dimension, between these and their plain-torch twins.
"""

from typing import Any

import torch

from penstock import _csrc
from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import Ops, torch_ops

DTYPES = (torch.float32, torch.bfloat16)
_SILU, _GELU_TANH = 0, 1


def make_ops(dtype: torch.dtype, head_dim: int, num_threads: int | None = None, level: str | None = None) -> Ops:
    """Kernels for a model in `dtype` with heads of `head_dim`, on at most `num_threads` threads (None: torch's).

    The C kernels are for float32 and bfloat16 and an even head_dim; anything else gets the plain-torch twins.
    `level` names the vector instructions to use (see `levels`); None is the best that the CPU has.
    """
    if dtype not in DTYPES or head_dim % 2:
        return torch_ops.OPS
    kernels = _Kernels(dtype, describe_cpu(dtype, num_threads, level))
    return Ops(
        kernels.rms_norm,
        kernels.add_rms_norm,
        kernels.rope_and_store,
        kernels.latent_rope_and_store,
        kernels.paged_attention,
        kernels.latent_attention,
        kernels.silu_mul,
        kernels.gelu_tanh_mul,
        torch_ops.choose_experts,
    )


def levels() -> list[str]:
    """The instruction levels this CPU can run, slowest first."""
    best = _csrc.lib.penstock_cpu_best_level()
    return [_csrc.ffi.string(_csrc.lib.penstock_cpu_level_name(i)).decode() for i in range(best + 1)]


def describe_cpu(dtype: torch.dtype, num_threads: int | None, level: str | None) -> Any:
    """How the C side is to run, the first argument of its functions; None as in `make_ops`."""
    names = levels()
    if level is not None and level not in names:
        raise ValueError(f"level: {level!r} is not one of {names} on this CPU")
    return _csrc.ffi.new(
        "struct penstock_cpu *",
        {
            "level": names.index(level or names[-1]),
            "num_threads": num_threads or torch.get_num_threads(),
            "is_bfloat16": dtype is torch.bfloat16,
        },
    )


class _Kernels:
    """The calls, 2 to 3 µs of Python each. What they assert is our own contract; sizes were checked at start."""

    def __init__(self, dtype: torch.dtype, cpu: Any) -> None:
        self._dtype, self._cpu = dtype, cpu
        self._lib: Any = _csrc.lib

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        assert x.dtype is self._dtype and weight.dtype is torch.float32
        y = torch.empty_like(x)  # contiguous also where x is a slice of wider rows
        stride = _row_stride(x)
        self._lib.penstock_norm(
            self._cpu, x.data_ptr(), stride, 0, 0, weight.data_ptr(), y.data_ptr(), 0, rows, width, eps
        )
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        assert x.dtype is residual.dtype is self._dtype and weight.dtype is torch.float32
        y, total = torch.empty_like(x), torch.empty_like(x)
        self._lib.penstock_norm(
            self._cpu,
            x.data_ptr(),
            _row_stride(x),
            residual.data_ptr(),
            _row_stride(residual),
            weight.data_ptr(),
            y.data_ptr(),
            total.data_ptr(),
            rows,
            width,
            eps,
        )
        return y, total

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        kv_slots: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Normalize q and k per head if weights are given, rotate them, write k and v into their pages; returns q."""
        tokens, q_heads, head_dim = q.shape
        page_stride, slot_stride, _ = k_pages.stride()
        assert q.dtype is k_pages.dtype is self._dtype and v_pages.stride() == (page_stride, slot_stride, 1)
        assert positions.dtype is torch.int32 and kv_slots.dtype is torch.int64 and cos.dtype is torch.float32
        rotated = torch.empty_like(q)
        self._lib.penstock_rope(
            self._cpu,
            tokens,
            q.data_ptr(),
            _head_stride(q),
            k.data_ptr(),
            _head_stride(k),
            0 if v is None else v.data_ptr(),
            0 if v is None else _head_stride(v),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            positions.data_ptr(),
            kv_slots.data_ptr(),
            0 if q_weight is None else q_weight.data_ptr(),
            0 if k_weight is None else k_weight.data_ptr(),
            eps,
            rotated.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            page_stride,
            slot_stride,
            q_heads,
            k.shape[1],
            head_dim,
            k_pages.shape[1],
        )
        return rotated

    def latent_rope_and_store(
        self,
        goal: torch.Tensor,
        q: torch.Tensor,
        down: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        latents: torch.Tensor,
        kv_slots: torch.Tensor,
        first: int,
        is_whole: bool,
    ) -> None:
        """As the twin in `torch_ops`; there is no attention here that asks for whole queries."""
        rope_dim = 2 * cos.shape[1]
        assert len(goal) == len(q) and first == 0 and not is_whole
        rotating, key = torch_ops.latent_parts(self.rms_norm, q, down, weight, eps, rope_dim)
        given = None, cos, sin, positions, latents, latents, kv_slots
        self.rope_and_store(key[:, :0], key, *given)
        goal[..., :rope_dim] = self.rope_and_store(rotating, rotating[:, :0], *given)

    def paged_attention(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of every token over its row's pages; with a window, over the last `window` positions."""
        tokens, q_heads, head_dim = q.shape
        _, page_size, kv_width = k_pages.shape
        page_stride, slot_stride, _ = k_pages.stride()
        assert q.dtype is k_pages.dtype is self._dtype and v_pages.stride() == (page_stride, slot_stride, 1)
        assert scale > 0  # the largest score is found before it is scaled
        tables = batch.block_tables
        out = torch.empty_like(q)
        failed = self._lib.penstock_attention(
            self._cpu,
            tables.shape[0],
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            q.data_ptr(),
            _head_stride(q),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            page_stride,
            slot_stride,
            out.data_ptr(),
            q_heads,
            kv_width // head_dim,
            head_dim,
            page_size,
            scale,
            0 if window is None else window,
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return out

    def latent_attention(
        self, q: torch.Tensor, latents: torch.Tensor, batch: ForwardBatch, scale: float, rope_dim: int
    ) -> torch.Tensor:
        return self.paged_attention(q, latents, latents, batch, scale)[..., rope_dim:]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(_SILU, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(_GELU_TANH, gate_up)

    def _gate(self, activation: int, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        assert gate_up.dtype is self._dtype
        out = torch.empty((rows, width // 2), dtype=self._dtype)
        self._lib.penstock_gate(
            self._cpu, activation, gate_up.data_ptr(), _row_stride(gate_up), out.data_ptr(), rows, width // 2
        )
        return out


def _row_stride(x: torch.Tensor) -> int:
    """From row to row of [T, H]; a row itself must be contiguous."""
    row, element = x.stride()
    assert element == 1 or x.shape[1] == 1
    return row


def _head_stride(x: torch.Tensor) -> int:
    """From token to token of [T, heads, D]; a token's heads must lie side by side."""
    token, head, element = x.stride()
    assert element == 1 and (head == x.shape[2] or x.shape[1] == 1)
    return token
