"""A model folder with quantized linear layers: presents the several tensors of each `x.weight` as that one weight.

The tensor names determine which layers are quantized. The shape and dtype of every tensor are checked against those of
its weight and the schemes that config.json allows. Layouts:

  awq      qweight int32 [in, out / 8], qzeros [groups, out / 8]: eight codes of a word are of outputs 0 2 4 6 1 3 5 7
  gptq     qweight int32 [in · bits / 32, out], qzeros [groups, out · bits / 32] (minus one, except in gptq_v2)
  packed   weight_packed int32 [out, in · bits / 32], weight_zero_point [out · bits / 32, groups] or int8 [out, groups]
  bytes    weight int8 [out, in], weight_zero_point int8;  floats: weight float8_e4m3fn

Scales are [groups, out] for the first two, [out, groups] for the others. `g_idx` [in] is the group of each input.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.executor.kernels.stored_formats import Groups, Shuffled, group_of
from penstock.executor.kernels.weight import EIGHT_BITS, Weight
from penstock.executor.loading.quantization import Scheme
from penstock.executor.loading.safetensors_folder import SafetensorsFolder
from penstock.executor.protocol import ExecutorError

MAIN = {"awq": "qweight", "gptq": "qweight", "gptq_v2": "qweight", "packed": "weight_packed"}
MAIN |= {"bytes": "weight", "floats": "weight"}
_BESIDE = "qzeros scales g_idx weight_scale weight_zero_point weight_shape weight_g_idx input_scale input_zero_point"
_SCALES = ("F16", "BF16", "F32")
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the positions in a word of outputs 0, 1, …


class PackedCheckpoint:
    """A checkpoint with quantized weights. Raises ExecutorError with tensor and shape if tensors do not match."""

    def __init__(self, folder: SafetensorsFolder, schemes: list[Scheme], where: str) -> None:
        self.config: dict[str, Any] = folder.config
        self.has_codes = any(scheme.layout != "floats" for scheme in schemes)
        self._folder, self._schemes, self._where = folder, schemes, where
        self._layout, self._main = schemes[0].layout, MAIN[schemes[0].layout]

    @cached_property
    def _stored(self) -> dict[str, bool]:
        """Map the names of weights and of other tensors to True if they are quantized."""
        names = self._folder.names()
        end = f".{self._main}"
        packed = [name.removesuffix(end) for name in names if name.endswith(end)]
        if self._main == "weight":  # of which some may be unquantized
            packed = [each for each in packed if self._folder.dtype(f"{each}{end}") in ("I8", "F8_E4M3")]
        kinds = {self._main, *_BESIDE.split()} - ({"weight_zero_point"} if self._layout == "floats" else set())
        beside = {f"{module}.{kind}" for module in packed for kind in kinds}
        others = [name for name in names if name not in beside]
        return dict.fromkeys(others, False) | {f"{module}.weight": True for module in packed}

    def names(self) -> list[str]:
        return list(self._stored)

    def float_dtype(self) -> str:
        return self._folder.float_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._stored[name]:
            return self._folder.shape(name)
        module = name.removesuffix(".weight")
        stored_shape = self._folder.shape(f"{module}.{self._main}")
        if len(stored_shape) != 2 or 0 in stored_shape:
            raise self._error(f"{module}.{self._main}", "shape", list(stored_shape), "a matrix's")
        if self._layout == "packed":
            return self._packed_shape(module, stored_shape)
        first, second = stored_shape
        if self._layout == "awq":
            return second * 8, first
        return stored_shape if self._main == "weight" else (second, first * 32 // self._schemes[0].bits)

    def _packed_shape(self, module: str, stored_shape: tuple[int, ...]) -> tuple[int, int]:
        name = f"{module}.weight_shape"
        rows, columns = self._get(name, ("I64", "I32"), (2,)).tolist()
        allowed = {stored_shape[1] * 32 // scheme.bits for scheme in self._schemes}
        if rows != stored_shape[0] or columns not in allowed:
            expected = " or ".join(f"[{stored_shape[0]}, {count}]" for count in sorted(allowed))
            raise self._error(name, "value", [rows, columns], f"{expected}, by the packed weight,")
        return rows, columns

    def read(self, name: str) -> Tensor | Weight:
        if not self._stored[name]:
            return self._folder.read(name)
        module = name.removesuffix(".weight")
        read = {"awq": self._awq, "gptq": self._gptq, "gptq_v2": self._gptq}.get(self._layout, self._compressed)
        part, scheme, g_idx = read(module, *self.shape(name))
        assert part.scales is not None
        finite = part.scales.isfinite().all(1)
        if not finite.all():
            row = int((~finite).nonzero()[0, 0])
            raise ExecutorError(f"{self._where}: tensor {name!r}: row {row} has a scale that is not finite")
        middle = 1 << scheme.bits - 1
        if scheme.is_symmetric and part.zeros is not None and bool((part.zeros == middle).all()):
            part = part._replace(zeros=None)
        return part if g_idx is None else self._grouped(part, scheme.bits, f"{module}.{g_idx}")

    def _awq(self, module: str, rows: int, columns: int) -> tuple[Weight, Scheme, None]:
        scheme, groups = self._schemes[0], self._groups(module, columns)
        stored = self._get(f"{module}.qweight", ("I32",), (columns, rows // 8))
        zeros = self._get(f"{module}.qzeros", ("I32",), (groups, rows // 8))
        codes, middles = (
            _unpacked(part, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1) for part in (stored, zeros)
        )
        scales = self._get(f"{module}.scales", _SCALES, (groups, rows))
        turned = _turned(codes), _turned(scales), _turned(middles)
        return Weight(Groups(4), *turned, name=f"{module}.weight"), scheme, None

    def _gptq(self, module: str, rows: int, columns: int) -> tuple[Weight, Scheme, str | None]:
        scheme, groups = self._schemes[0], self._groups(module, columns)
        bits = scheme.bits
        if rows * bits % 32:
            raise self._error(f"{module}.qweight", "outputs", rows, f"a multiple of {32 // bits}")
        stored = self._get(f"{module}.qweight", ("I32",), (columns * bits // 32, rows))
        zeros = self._get(f"{module}.qzeros", ("I32",), (groups, rows * bits // 32))
        if self._layout == "gptq":  # stored minus one; adding ones to whole words restores them, borrows included
            zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
        scales = self._get(f"{module}.scales", _SCALES, (groups, rows))
        parts = _unpacked(_turned(stored), bits), _turned(scales), _turned(_unpacked(zeros, bits))
        part = Weight(Groups(bits), *parts, name=f"{module}.weight")
        return part, scheme, "g_idx" if self._has(f"{module}.g_idx") else None

    def _compressed(self, module: str, rows: int, columns: int) -> tuple[Weight, Scheme, str | None]:
        name = f"{module}.weight_scale"
        scales_shape = self._folder.shape(name) if self._has(name) else ()
        scheme, groups = self._scheme(module, columns, scales_shape[1] if len(scales_shape) == 2 else 1)
        is_one = scales_shape in ((), (1,), (1, 1)) and groups == 1
        scales = self._get(name, _SCALES, scales_shape if is_one else (rows, groups)).expand(rows, groups).contiguous()
        dtype = {"packed": "I32", "bytes": "I8", "floats": "F8_E4M3"}[self._layout]
        bits, middle = scheme.bits, 1 << scheme.bits - 1
        shape = (rows, columns * bits // 32) if self._layout == "packed" else (rows, columns)
        codes = self._get(f"{module}.{self._main}", (dtype,), shape)
        if self._layout == "packed":
            codes = _unpacked(codes, bits)
        elif codes.dtype is not EIGHT_BITS:
            codes = codes.view(torch.uint8) ^ 128
        zeros = self._zeros(f"{module}.weight_zero_point", rows, groups, bits, middle)
        g_idx = "weight_g_idx" if self._has(f"{module}.weight_g_idx") else None
        return Weight(Groups(bits), codes, scales, zeros, name=f"{module}.weight"), scheme, g_idx

    def _zeros(self, name: str, rows: int, groups: int, bits: int, middle: int) -> Tensor | None:
        if self._layout == "floats" or not self._has(name):
            return None
        if self._layout == "packed" and self._folder.dtype(name) == "I32":
            stored = self._get(name, ("I32",), (-(-rows * bits // 32), groups))
            return _turned(_unpacked(_turned(stored), bits)[:, :rows])
        stored_shape = self._folder.shape(name)
        stored = self._get(name, ("I8",), stored_shape if stored_shape == (1,) and groups == 1 else (rows, groups))
        return (stored.short() + middle).to(torch.uint8).expand(rows, groups).contiguous()

    def _scheme(self, module: str, columns: int, groups: int) -> tuple[Scheme, int]:
        """Return the scheme that the number of the module's scales matches, and its number of groups."""
        packed = self._folder.shape(f"{module}.{self._main}")[1]
        for scheme in self._schemes:
            fits = self._layout != "packed" or packed * 32 == columns * scheme.bits
            if fits and groups == (1 if scheme.group == -1 else columns / scheme.group):
                return scheme, groups
        allowed = ", ".join(f"{scheme.bits} bits by {scheme.group}" for scheme in self._schemes)
        raise self._error(f"{module}.weight_scale", "groups", groups, f"as many as {allowed} have for {columns} inputs")

    def _groups(self, module: str, columns: int) -> int:
        size = self._schemes[0].group
        if size != -1 and columns % size:
            raise ExecutorError(
                f"{self._where}: quantization_config: group_size: {size} found; a divisor of {columns}, the inputs of "
                f"{module!r}, is expected"
            )
        return 1 if size == -1 else columns // size

    def _grouped(self, part: Weight, bits: int, name: str) -> Weight:
        """Return the weight with the groups that the tensor `name` gives to its inputs."""
        columns, group = part.shape[1], group_of(part)
        groups = columns // group
        g_idx = self._get(name, ("I32", "I64"), (columns,)).long()
        if (g_idx == -1).all():
            return part  # compressed-tensors writes -1 if the columns are in order
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= groups:
            raise self._error(name, "group", low if low < 0 else high, f"one of 0 to {groups - 1}")
        counts = torch.bincount(g_idx, minlength=groups)
        if (counts != group).any():
            odd = int((counts != group).nonzero()[0, 0])
            raise self._error(name, f"group {odd} with inputs", int(counts[odd]), f"{group} of each")
        are_neighbours = torch.equal(g_idx, torch.arange(columns) // group)
        return part if are_neighbours else part._replace(format=Shuffled(bits, g_idx))

    def _has(self, name: str) -> bool:
        return name in self._folder.names()

    def _get(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        if not self._has(name):
            raise ExecutorError(f"{self._where}: tensor {name!r} of shape {list(shape)} is missing")
        stored_shape, dtype = self._folder.shape(name), self._folder.dtype(name)
        if stored_shape != shape:
            raise self._error(name, "shape", list(stored_shape), str(list(shape)))
        if dtype not in dtypes:
            raise self._error(name, "dtype", dtype, " or ".join(dtypes))
        return self._folder.stored(name)

    def _error(self, name: str, aspect: str, actual: object, expected: str) -> ExecutorError:
        return ExecutorError(f"{self._where}: tensor {name!r}: {aspect} {actual} found; {expected} is expected")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, words] to uint8 [n, codes], the lowest bits first."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def _turned(values: Tensor) -> Tensor:
    return values.t().contiguous()
