"""Dequantizes the weights that the Triton kernel reads as codes."""

import torch
from torch import Tensor

from penstock.executor.kernels.gpu_formats import MXFP4
from penstock.executor.kernels.weight import Weight


def widen(weight: Weight) -> Tensor:
    """Return numbers [..., N, K] in the order of the inputs, float32."""
    if weight.format is MXFP4:
        return widen_mxfp4(*weight.tensors())
    if weight.codes.dim() == 3:
        return torch.stack([widen(weight.like(parts)) for parts in zip(*weight.tensors(), strict=True)])
    return weight.dequantize(weight.codes.device, torch.float32)


def widen_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize codes [..., K / 2] with scales [..., K / 32], in the layout of `Mxfp4`, to float32 [..., K]."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    table = torch.cat((sizes, -sizes))
    pairs = codes.unflatten(-1, (-1, 16))
    numbers_of = torch.cat((pairs & 15, pairs >> 4), dim=-1)
    wide: Tensor = (table[numbers_of.int()] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
    return wide
