"""Weights of eight bits with one scale per 128 × 128 of them, as DeepSeek-V3 and the FP8 Qwen3 are stored.

`x.weight` is float8_e4m3fn, `x.weight_scale_inv` the scales that it is multiplied by (whatever the name says). Which
tensors are stored so, the file says; config.json says that there are any, and every other scheme is refused by it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.kernels.eight_bits import BLOCK, pad_scales
from penstock.executor.loading.fields import Fields

SUFFIX = "_scale_inv"
EIGHT_BITS = torch.float8_e4m3fn


def check_quantization(config: dict[str, Any], where: str) -> None:
    """Refuse what is not computed here, before any weight is read."""
    fields = Fields(config, where).section("quantization_config")
    if fields is None:
        return
    fields.only("quant_method", "fp8", "mxfp4")
    if fields.text("quant_method") == "mxfp4":  # of experts, whose tensors' names say so
        fields.only("dequantize", False, default=False)
        fields.texts("modules_to_not_convert")
        fields.no_others()
        return
    fields.only("fmt", "e4m3", default="e4m3")
    fields.only("weight_block_size", [BLOCK, BLOCK])
    fields.only("activation_scheme", "dynamic", default="dynamic")
    fields.only("scale_fmt", "float", "ue8m0", default="float")  # either way stored as floats: their dtype is checked
    fields.only("expert_dtype", "fp8", default="fp8")
    fields.only("dequantize", False, default=False)
    for name in ("modules_to_not_convert", "modules_to_convert", "ignored_layers"):
        fields.texts(name)
    fields.no_others()


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-columns // BLOCK)


class WeightPart(NamedTuple):
    """A tensor or a rank's part of one. Values of eight bits come with the scales of the whole tensor, in which the
    part begins at `row` and `column`: it may be cut anywhere, and each value still meets its own scale."""

    values: Tensor
    scales: Tensor | None = None
    row: int = 0
    column: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def narrow(self, dim: int, start: int, size: int) -> "WeightPart":
        row, column = (self.row + start, self.column) if dim == 0 else (self.row, self.column + start)
        return WeightPart(self.values.narrow(dim, start, size), self.scales, row, column)

    def numbers(self, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:
        """Value times scale in float32, rounded to `dtype`; a few rows at a time, so that no float32 copy is made."""
        if self.scales is None:
            return self.values.to(device=device, dtype=dtype, copy=copy)
        values, scales = self.values.to(device).view(torch.uint8), self.scales.to(device, torch.float32)
        table = torch.arange(256, dtype=torch.uint8, device=device).view(EIGHT_BITS).float()
        rows, columns = values.shape
        out = torch.empty((rows, columns), dtype=dtype, device=device)
        by_column = scales[:, torch.arange(self.column, self.column + columns, device=device) // BLOCK]
        start = 0
        while start < rows:
            block = (self.row + start) // BLOCK
            end = min((block + 1) * BLOCK - self.row, rows)
            # Looked up: on a CPU torch converts eight bits at a quarter of this speed.
            numbers = table.index_select(0, values[start:end].int().flatten()).view(-1, columns)
            torch.mul(numbers, by_column[block], out=out[start:end])
            start = end
        return out


class Blocks(NamedTuple):
    """A weight [N, K] that keeps its eight bits, and its scales as `eight_bits.pad_scales` leaves them."""

    values: Tensor
    scales: Tensor


def whole_blocks(given: Sequence[object], device: torch.device) -> Blocks | None:
    """The parts on top of each other, if the blocks of each are blocks of the whole and the kernels take the shape."""
    parts = [part for part in given if isinstance(part, WeightPart) and part.scales is not None]
    if len(parts) < len(given):
        return None
    rows = [len(part.values) for part in parts]
    starts = [part.row for part in parts] + [part.column for part in parts]
    # Only at the very end may a block have fewer than 128 rows.
    if any(start % BLOCK for start in (*starts, *rows[:-1])):
        return None
    if sum(rows) % 16 or parts[0].values.shape[1] % BLOCK:
        return None
    scales = []
    for part in parts:
        assert part.scales is not None
        deep, wide = scales_shape(*part.values.shape)
        row, column = part.row // BLOCK, part.column // BLOCK
        scales.append(part.scales[row : row + deep, column : column + wide])
    values = torch.cat([part.values.to(device).view(torch.uint8) for part in parts]).view(EIGHT_BITS)
    return Blocks(values, pad_scales(torch.cat(scales).to(device)))
