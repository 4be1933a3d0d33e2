"""`BlockOps` in plain torch, as this module is one: the oracle of the Triton kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.eight_bits import FP8_MAX, TINY, make_quantized
from penstock.executor.kernels.stored_formats import BLOCK
from tests.support.eight_bits import dequantize
from tests.support.twins import torch_ops


def quantize(x: Tensor) -> Quantized:
    values, scales = make_quantized(len(x), x.shape[1], x.device)
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales.copy_(blocks.abs().amax(-1).clamp(min=TINY) / FP8_MAX)
    values.copy_((blocks / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1))
    return values, scales


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    y, total = torch_ops.add_rms_norm(x, residual, weight, eps)
    return quantize(y), total


def silu_mul_quantize(gate_up: Tensor) -> Quantized:
    return quantize(torch_ops.gate(gate_up, "silu"))


def block_linear(x: Quantized, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(widen_rows(x), dequantize(weight, weight_scales)).to(dtype)


def widen_rows(x: Quantized) -> Tensor:
    """[T, K] float32"""
    values, scales = x
    rows: Tensor = (values.float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return rows
