"""Kernels that work row by row: RMSNorm, alone or with the residual's addition, and the gated activations."""

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.tiles import power_of_2, row_warps

GATE_BLOCK = 1024
SILU, GELU_TANH = 0, 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, weight, y, y, eps, adds=False)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dtype is residual.dtype
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y)
    _launch_norm(x, residual, weight, y, total, eps, adds=True)
    return y, total


def _launch_norm(x, residual, weight, y, total, eps: float, adds: bool) -> None:
    rows, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1
    if not rows:
        return
    block = power_of_2(width)
    _norm[(rows,)](
        x,
        residual,
        weight,
        y,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=adds,
        num_warps=row_warps(block),
        **launching(),
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gate(gate_up, SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _gate(gate_up, GELU_TANH)


def _gate(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, GATE_BLOCK))
        _gate_rows[grid](
            gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=GATE_BLOCK, num_warps=4, **launching()
        )
    return out


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per row. The sum is rounded to the stream's dtype before it is normalized, as in the twin."""
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
        x = total.to(tl.float32)
    y = normalize(x, tl.load(weight_ptr + column, mask=inside, other=0.0), eps, WIDTH)
    tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalize(x, weight, eps, WIDTH: tl.constexpr):
    """x float32, zero beyond WIDTH."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)) * weight


@triton.jit
def _gate_rows(
    gate_up_ptr, out_ptr, stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, or GELU by its tanh formula; both are x times a sigmoid, which saturates without overflow."""
    if ACTIVATION == 1:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of tanh
    else:
        inner = x
    return x / (1.0 + tl.exp(-inner))
