"""The formats in which checkpoints store quantized weights, and their packing for kernels.

They can be sliced and dequantized. A new format defines here how it is sliced, dequantized and packed for C and for the
Triton kernels; one without a packing is dequantized at load time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.code_types import CODE_TYPES, CodeType
from penstock.executor.kernels.gpu_formats import MXFP4, MXFP4_BLOCK, Packed, scaled
from penstock.executor.kernels.weight import EIGHT_BITS, Format, GpuFormats, Weight

_lib: Any = _csrc.lib
BLOCK = 128  # rows and columns that share one scale in `Blocks`
LEAST_GROUP = 16
CPU_GROUP = 32  # neighbours along the depth that share one scale in C
HALVES = (64, 32, 16)  # numbers along the depth that a Triton kernel dequantizes at a time


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    """float8_e4m3fn with one float32 scale per 128 × 128 block, the format of DeepSeek-V3 and the FP8 Qwen3."""

    multiplies_eight_bits: ClassVar[bool] = True

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:  # noqa: ARG002
        return start // BLOCK * BLOCK, end

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        assert weight.scales is not None and start % BLOCK == 0
        scales = weight.scales.narrow(dim, start // BLOCK, -(-size // BLOCK))
        return weight._replace(codes=weight.codes.narrow(dim, start, size), scales=scales)

    def rows_of_scales(self, rows: Tensor) -> Tensor | None:
        firsts = rows[::BLOCK]
        blocks = (firsts[:, None] + torch.arange(BLOCK)).flatten()
        return None if (firsts % BLOCK).any() or not torch.equal(rows, blocks[: len(rows)]) else firsts // BLOCK

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        assert weight.scales is not None
        # A lookup table, because torch's conversion from FP8 on a CPU has a quarter of its speed.
        table = torch.arange(256, dtype=torch.uint8, device=device).view(EIGHT_BITS).float()
        codes = weight.codes[first:end].to(device).view(torch.uint8)
        values = table.index_select(0, codes.int().flatten()).view(codes.shape)
        row, column = (torch.arange(*span, device=device) // BLOCK for span in ((first, end), (0, codes.shape[1])))
        by: Tensor = weight.scales.to(device, torch.float32)[row[:, None], column]
        return values.mul_(by)


BLOCKS = Blocks()


@dataclass(frozen=True, slots=True)
class Groups(Format):
    """Group-quantized codes of four or eight bits, one per byte, with a scale per group of neighbours: [rows, groups].

    A number is (code - zero) · scale with uint8 zeros, or code · scale - minimum with float16 minima in place of the
    zeros; without either, the zero is the middle code. float8_e4m3fn codes are numbers and have no zero. AWQ, GPTQ and
    compressed-tensors store such weights, and GGUF weights can be converted to this format.
    """

    has_lookup: ClassVar[bool] = True
    bits: int = 4

    @property
    def storage_name(self) -> str:
        return f"{self.bits} bits"

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:
        columns = weight.shape[1]
        if dim == 0 or (start, end) == (0, columns):
            return start, end
        group = group_of(weight)
        if group == columns or math.gcd(group, start, end - start) >= LEAST_GROUP:
            return start, end
        unit = LEAST_GROUP if group % LEAST_GROUP == 0 else group
        return start // unit * unit, min(-(-end // unit) * unit, columns)

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        if dim == 0:
            return weight.like(tensor.narrow(0, start, size) for tensor in weight.tensors())
        whole, zeros = group_of(weight), weight.zeros
        assert weight.scales is not None
        codes = weight.codes.narrow(1, start, size)
        if whole == weight.shape[1]:
            return weight._replace(codes=codes)
        group = math.gcd(whole, start, size)

        def cut(values: Tensor) -> Tensor:
            return values.repeat_interleave(whole // group, 1).narrow(1, start // group, size // group)

        return weight._replace(codes=codes, scales=cut(weight.scales), zeros=None if zeros is None else cut(zeros))

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        assert weight.scales is not None
        zeros = None if weight.zeros is None else weight.zeros[first:end].to(device)
        return scaled(weight.codes[first:end].to(device), weight.scales[first:end].to(device), zeros, self.bits)

    def fingerprint_parts(self, weight: Weight) -> tuple[str, list[Tensor]]:
        return f"groups of {self.bits}", weight.tensors()

    def codes_for_cpu(self, weight: Weight) -> tuple[CodeType, Weight] | None:
        if weight.codes.dtype is EIGHT_BITS or group_of(weight) % CPU_GROUP:
            return None
        scales, zeros = _in_16_bits(weight.scales), weight.zeros
        if scales is None or (zeros is not None and zeros.is_floating_point()):
            return None
        name = f"G{self.bits}" if zeros is not None else f"Q{self.bits}_0"
        if scales.dtype is torch.bfloat16:
            name = f"G{self.bits}_BF16"
        return CODE_TYPES[name], weight._replace(scales=scales)

    def pack_for_cpu(self, weight: Weight, kind: CodeType, columns: int, panels: Tensor) -> None:
        parts = [None if part is None else part.contiguous() for part in weight[1:4]]
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        sizes = *weight.shape, group_of(weight), columns
        _lib.penstock_group_pack(kind.number, *addresses, *sizes, panels.data_ptr())

    def codes_for_gpu(self, weight: Weight, computed: GpuFormats) -> Weight | None:
        is_computed = computed.has_groups and (weight.codes.dtype is not EIGHT_BITS or computed.has_eight_bits)
        return weight if is_computed and half_of(weight) is not None else None

    def join_key(self, weight: Weight) -> tuple[object, ...]:
        return self, group_of(weight), *(None if part is None else part.dtype for part in weight[1:4])

    def pack_for_gpu(self, weights: Sequence[Weight], device: torch.device) -> Weight:
        first, half = weights[0], half_of(weights[0])
        assert half is not None
        codes = torch.cat([weight.codes.to(device).view(torch.uint8) for weight in weights])
        if self.bits == 4:
            low, high = codes.unflatten(1, (-1, 2, half)).unbind(2)
            codes = (low | high << 4).flatten(1)
        codes = codes.view(first.codes.dtype)

        def turned(values: list[Tensor]) -> Tensor | None:
            return torch.cat([each.to(device) for each in values]).t().contiguous() if values else None

        scales = turned([weight.scales for weight in weights if weight.scales is not None])
        zeros = turned([weight.zeros for weight in weights if weight.zeros is not None])
        return Weight(Packed(self.bits, half), codes, scales, zeros)


def group_of(weight: Weight) -> int:
    """Return the group size of a weight of `Groups`: the number of neighbours that share one scale."""
    assert weight.scales is not None
    return weight.codes.shape[1] // weight.scales.shape[1]


def half_of(weight: Weight) -> int | None:
    """Return the `half` of `Packed` for a weight of `Groups`; None if the kernels do not support its shape."""
    assert isinstance(weight.format, Groups)
    columns, group, per_byte = weight.shape[1], group_of(weight), 8 // weight.format.bits
    fits = (half for half in HALVES if not columns % (half * per_byte) and not (group % half and half % group))
    return next(fits, None)


def _in_16_bits(scales: Tensor | None) -> Tensor | None:
    """Return scales as float16 or bfloat16 if that is exact."""
    if scales is None or scales.dtype is not torch.float32:
        return scales
    candidates = (scales.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((converted for converted in candidates if torch.equal(converted.float(), scales)), None)


@dataclass(frozen=True, eq=False, slots=True)
class Shuffled(Format):
    """Codes like those of `Groups`, but the inputs of a group are not neighbours (GPTQ with act-order). No kernel reads
    this format: such weights are dequantized at load time."""

    bits: int
    group_of_input: Tensor  # int64 [columns]

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:
        return (start, end) if dim == 0 else (0, weight.shape[1])

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        assert dim == 0
        return weight.like(tensor.narrow(0, start, size) for tensor in weight.tensors())

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        by = self.group_of_input.to(device)
        codes, scales, zeros = (None if part is None else part[first:end].to(device) for part in weight[1:4])
        assert codes is not None and scales is not None
        return scaled(codes, scales[:, by], None if zeros is None else zeros[:, by], self.bits)

    def fingerprint_parts(self, weight: Weight) -> tuple[str, list[Tensor]]:
        return f"shuffled groups of {self.bits}", [*weight.tensors(), self.group_of_input]


@dataclass(frozen=True, slots=True)
class Ggml(Format):
    """The quantized blocks of a GGUF file: uint8 [rows, bytes], which C decodes (csrc/codes.c)."""

    type: CodeType

    @property
    def storage_name(self) -> str:
        return self.type.name

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return weight.codes.shape[0], weight.codes.shape[1] // self.type.size_bytes * self.type.block

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:  # noqa: ARG002
        unit = self.type.block if dim == 1 else 1
        return start // unit * unit, -(-end // unit) * unit

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        if dim == 1:
            start, size = (at // self.type.block * self.type.size_bytes for at in (start, size))
        return weight._replace(codes=weight.codes.narrow(dim, start, size))

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        some = weight.codes[first:end].contiguous()
        blocks, columns = some.numel() // self.type.size_bytes, weight.shape[1]
        values = torch.empty((end - first, columns))
        bad = _lib.penstock_code_values(self.type.number, some.data_ptr(), blocks, values.data_ptr())
        if bad >= 0:
            raise weight.error(first + bad * self.type.block // columns)
        return values.to(device)

    def codes_for_cpu(self, weight: Weight) -> tuple[CodeType, Weight] | None:
        return self.type, weight

    def pack_for_cpu(self, weight: Weight, kind: CodeType, columns: int, panels: Tensor) -> None:
        stored = weight.codes.contiguous()
        bad = _lib.penstock_code_pack(kind.number, stored.data_ptr(), *weight.shape, columns, panels.data_ptr())
        if bad >= 0:
            raise weight.error(bad)

    def codes_for_gpu(self, weight: Weight, computed: GpuFormats) -> Weight | None:
        if self.type.name == "MXFP4":
            return weight if computed.has_mxfp4 else None
        if not computed.has_groups:
            return None
        groups = as_groups(weight)
        return groups.format.codes_for_gpu(groups, computed)

    def join_key(self, weight: Weight) -> tuple[object, ...]:  # noqa: ARG002
        return (self,)

    def pack_for_gpu(self, weights: Sequence[Weight], device: torch.device) -> Weight:
        """Concatenate MXFP4 weights as `Mxfp4`; raise ExecutorError if a scale is not finite. Other types are converted
        to `Groups` before they are packed."""
        assert self.type.name == "MXFP4"
        size = MXFP4_BLOCK // 2 + 1
        for weight in weights:
            bad = (weight.codes[:, ::size] == 255).any(1).nonzero()
            if len(bad):
                raise weight.error(int(bad[0]))
        rows = torch.cat([weight.codes for weight in weights]).unflatten(1, (-1, size))
        return Weight(MXFP4, rows[..., 1:].flatten(1).to(device), rows[..., 0].contiguous().to(device))


def as_groups(weight: Weight) -> Weight:
    """Convert a `Ggml` weight to `Groups`. Each group's scale is multiplied out and rounded to float16, a relative
    error of at most 1/4096; bfloat16 rounds every product to 1/512."""
    assert isinstance(weight.format, Ggml)
    (rows, columns), number = weight.shape, weight.format.type.number
    stored, groups = weight.codes.contiguous(), columns // _lib.penstock_code_group_values(number)
    codes = torch.empty((rows, columns), dtype=torch.uint8)
    halves = [torch.empty((rows, groups)) for _ in range(1 + _lib.penstock_code_has_minima(number))]
    blocks = stored.numel() // weight.format.type.size_bytes
    addresses = [part.data_ptr() for part in (stored, codes, *halves)]
    bad = _lib.penstock_code_groups(number, addresses[0], blocks, *addresses[1:], *(0,) * (2 - len(halves)))
    if bad >= 0:
        raise weight.error(bad * weight.format.type.block // columns)
    scales, *minima = (half.half() for half in halves)
    for half in (scales, *minima):
        if not (finite := half.isfinite().all(1)).all():
            raise weight.error(int((~finite).nonzero()[0, 0]))
    bits = _lib.penstock_code_group_bits(number)
    return Weight(Groups(bits), codes, scales, minima[0] if minima else None, name=weight.name)
