"""Weights of MXFP4 on a GPU: two codes a byte, each 0 … 6 in eight steps with a sign, times a power of two for 32 of them.

The grouped products of experts read them as they are (cuda/mxfp4_experts.py); any other product widens them first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels.codes import Coded

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class FourBitLinear:
    """[T, in] -> [T, out]. Byte i of a block of 16 has its codes i and i + 16."""

    def __init__(self, parts: list[Coded], dtype: torch.dtype, device: torch.device, bias: Tensor | None) -> None:
        """Raises ExecutorError where a scale is no number."""
        for part in parts:
            bad = (part.rows[:, :: part.type.size_bytes] == 255).any(1).nonzero()
            if len(bad):
                raise part.error(int(bad[0]))
        rows = torch.cat([part.rows for part in parts]).unflatten(1, (-1, BLOCK // 2 + 1))
        self.scales = rows[..., 0].contiguous().to(device)  # [out, in / 32]
        self.values = rows[..., 1:].flatten(1).to(device)  # [out, in / 2]
        self.bias, self._dtype = bias, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, widen(self.values, self.scales).to(self._dtype), self.bias)

    def tensors(self) -> list[Tensor]:
        return [self.values, self.scales] if self.bias is None else [self.values, self.scales, self.bias]


def widen(values: Tensor, scales: Tensor) -> Tensor:
    """[…, in / 2] and […, in / 32] -> […, in] float32"""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=values.device)
    pairs = values.unflatten(-1, (-1, BLOCK // 2))
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1)
    exponents = scales.float() - 127
    wide: Tensor = (table[codes.int()] * torch.exp2(exponents)[..., None]).flatten(-2)
    return wide
