"""Matrix products in eight bits with a scale per block, in plain torch: the oracle of the Triton kernels.

Weights are float8_e4m3fn with one float32 scale per 128 × 128, as DeepSeek-V3 and the FP8 Qwen3 store them; activations
are quantized on the way, with one scale per token and 128 numbers. The scales of the weight are padded along its
depth to a multiple of four, the layout that cuBLAS reads (`pad_scales`).
"""

import torch
import torch.nn.functional as F

from penstock.executor.kernels import BlockOps, torch_ops

BLOCK = 128
FP8_MAX = 448.0  # the largest finite float8_e4m3fn
TINY = 1e-10  # a block of zeros has this largest magnitude

Quantized = tuple[torch.Tensor, torch.Tensor]  # [T, K] float8_e4m3fn, [T, K / 128] float32 with stride (1, T)


def quantize(x: torch.Tensor) -> Quantized:
    """x [T, K], K a multiple of 128."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=TINY) / FP8_MAX
    values = (blocks / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1)
    return values, scales.t().contiguous().t()


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[Quantized, torch.Tensor]:
    y, total = torch_ops.add_rms_norm(x, residual, weight, eps)
    return quantize(y), total


def silu_mul_quantize(gate_up: torch.Tensor) -> Quantized:
    return quantize(torch_ops.silu_mul(gate_up))


def block_linear(x: Quantized, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, K] by weight [N, K] with scales [N / 128 rounded up, at least K / 128] -> [T, N]"""
    values, scales = x
    left = (values.float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return F.linear(left, _widen(weight, weight_scales)).to(dtype)


def fused_block_experts(
    hidden: torch.Tensor,
    slots: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    first: int,
    activation: str,
) -> torch.Tensor:
    """`torch_ops.fused_experts` with gate_up [S, 2 I, H] and down [S, H, I] of eight bits; tokens are not quantized."""
    gate_up, down = (
        torch.stack([_widen(*block) for block in zip(*weight, strict=True)]).to(hidden.dtype)
        for weight in ((gate_up, gate_up_scales), (down, down_scales))
    )
    return torch_ops.fused_experts(hidden, slots, shares, gate_up, down, first, activation)


def _widen(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] with scales [N / 128 rounded up, at least K / 128] -> float32"""
    width, depth = weight.shape
    by_row = scales.repeat_interleave(BLOCK, 0)[:width, : depth // BLOCK]
    return (weight.float().unflatten(1, (-1, BLOCK)) * by_row[..., None]).flatten(1)


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N / 128, K / 128] as a checkpoint has them -> [N / 128, K / 128 rounded up to a multiple of four]"""
    return F.pad(scales.float(), (0, -scales.shape[1] % 4))


OPS = BlockOps(quantize, silu_mul_quantize, add_rms_norm_quantize, block_linear, fused_block_experts)
