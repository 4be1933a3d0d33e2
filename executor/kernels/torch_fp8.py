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

FEW_ENTRIES = 16  # of an expert
ROW_MULTIPLE = 4  # of rows, for cuBLAS to take their scales

# [T, K] float8_e4m3fn, [T, K / 128] float32 by columns, both with room behind them for T to be a multiple of four
Quantized = tuple[torch.Tensor, torch.Tensor]


def make_quantized(rows: int, width: int, device: torch.device) -> Quantized:
    assert width % BLOCK == 0
    padded = _padded(rows)
    values = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((width // BLOCK, padded), dtype=torch.float32, device=device).t()
    return values[:rows], scales[:rows]


def pad_rows(x: Quantized) -> Quantized:
    """With the room behind the rows: what stands there nobody wrote, and of the products nobody reads its rows."""
    (values, scales), rows = x, _padded(len(x[0]))
    assert values.is_contiguous() and scales.stride() == (1, rows), "rows that `make_quantized` has not made"
    return values.as_strided((rows, values.shape[1]), values.stride()), scales.as_strided(
        (rows, scales.shape[1]), scales.stride()
    )


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def quantize(x: torch.Tensor) -> Quantized:
    """x [T, K], K a multiple of 128."""
    values, scales = make_quantized(len(x), x.shape[1], x.device)
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales.copy_(blocks.abs().amax(-1).clamp(min=TINY) / FP8_MAX)
    values.copy_((blocks / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1))
    return values, scales


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[Quantized, torch.Tensor]:
    y, total = torch_ops.add_rms_norm(x, residual, weight, eps)
    return quantize(y), total


def silu_mul_quantize(gate_up: torch.Tensor) -> Quantized:
    return quantize(torch_ops.silu_mul(gate_up))


def block_linear(x: Quantized, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, K] by weight [N, K] with scales [N / 128 rounded up, at least K / 128] -> [T, N]"""
    return F.linear(widen_rows(x), _widen(weight, weight_scales)).to(dtype)


def widen_rows(x: Quantized) -> torch.Tensor:
    """[T, K] float32"""
    values, scales = x
    return (values.float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)


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
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch_ops.fused_experts` with gate_up [S, 2 I, H] and down [S, H, I] of eight bits. What goes into the products is
    quantized if experts have many entries."""
    dtype = hidden.dtype
    up, narrow = (
        torch.stack([_widen(*block) for block in zip(*weight, strict=True)])
        for weight in ((gate_up, gate_up_scales), (down, down_scales))
    )
    if not are_quantized(slots.numel(), len(down)):
        return torch_ops.fused_experts(hidden, slots, shares, up.to(dtype), narrow.to(dtype), first, activation, added)

    def through(rows: torch.Tensor) -> torch.Tensor:
        return widen_rows(quantize(rows.to(dtype)))

    # In float32 but for what is rounded on its way into eight bits.
    wide = hidden.float()
    return torch_ops.fused_experts(wide, slots, shares, up, narrow, first, activation, added, through).to(dtype)


def are_quantized(entries: int, num_slots: int) -> bool:
    """Whether experts multiply in eight bits: with few entries each they only wait for their weights."""
    return entries > FEW_ENTRIES * num_slots


def _widen(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] with scales [N / 128 rounded up, at least K / 128] -> float32"""
    width, depth = weight.shape
    by_row = scales.repeat_interleave(BLOCK, 0)[:width, : depth // BLOCK]
    return (weight.float().unflatten(1, (-1, BLOCK)) * by_row[..., None]).flatten(1)


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N / 128, K / 128] as a checkpoint has them -> [N / 128, K / 128 rounded up to a multiple of four]"""
    return F.pad(scales.float(), (0, -scales.shape[1] % 4))


OPS = BlockOps(quantize, silu_mul_quantize, add_rms_norm_quantize, block_linear, fused_block_experts)
