"""The formats of quantized weights that the Triton kernels read. stored_formats.py packs them from checkpoints' formats."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.executor.kernels.weight import EIGHT_BITS, Format, Weight

MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Packed(Format):
    """`Groups` in the layout of the Triton kernels, [N, K] or for several experts [S, N, K]: uint8 [..., N, K · bits /
    8] or float8_e4m3fn, with scales and zeros [..., K / group, N]. A byte holds two four-bit codes whose inputs are
    `half` apart, so that one load serves two products."""

    is_packed: ClassVar[bool] = True
    bits: int
    half: int

    def shape(self, weight: Weight) -> tuple[int, ...]:
        *leading, width, row_bytes = weight.codes.shape
        return (*leading, width, row_bytes * 8 // self.bits)

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        codes = weight.codes[first:end]
        if self.bits == 4:
            runs = codes.unflatten(1, (-1, self.half))
            codes = torch.stack((runs & 15, runs >> 4), 2).flatten(1)
        assert weight.scales is not None
        zeros = None if weight.zeros is None else weight.zeros[:, first:end].t()
        return scaled(codes, weight.scales[:, first:end].t(), zeros, self.bits).to(device)

    def look_up(self, weight: Weight, indices: Tensor, dtype: torch.dtype) -> Tensor:
        assert weight.scales is not None
        indices = indices.long()
        scales, zeros = (None if part is None else part.index_select(1, indices) for part in weight[2:4])
        codes = weight.codes.view(torch.uint8).index_select(0, indices).view(weight.codes.dtype)
        return weight._replace(codes=codes, scales=scales, zeros=zeros).dequantize(indices.device, dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """MXFP4 in the layout of the Triton kernels: two 4-bit floats per byte, [..., N, K / 2], times 2 ** (scale - 127)
    with uint8 `scales` [..., N, K / 32]. Byte i of a block of 16 bytes holds the codes i and i + 16."""

    is_packed: ClassVar[bool] = True

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return (*weight.codes.shape[:-1], weight.codes.shape[-1] * 2)


MXFP4 = Mxfp4()


def scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """Dequantize codes [rows, columns] with scales and zeros [rows, groups] to float32, as `Groups` defines."""
    values = codes.float().unflatten(1, (scales.shape[1], -1))
    by, zero = scales.float()[..., None], 0.0 if codes.dtype is EIGHT_BITS else float(1 << bits - 1)
    if zeros is not None and zeros.is_floating_point():
        dequantized: Tensor = values * by - zeros[..., None].float()
    else:
        dequantized = (values - (zero if zeros is None else zeros[..., None].float())) * by
    return dequantized.flatten(1)
