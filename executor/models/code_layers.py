"""Which weights that are stored as codes are computed as codes, and the layers that do so."""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.executor.kernels import GroupOps
from penstock.executor.kernels.codes import Coded, CodedLinear
from penstock.executor.kernels.four_bits import FourBitLinear
from penstock.executor.kernels.grouped import Grouped, GroupedLinear, as_groups, half_of, kind_of, pack
from penstock.executor.kernels.linear import Linear, Reordered, SideBySide
from penstock.executor.loading.block_scales import WeightPart

Part = WeightPart | Coded | Grouped
# Which codes stay codes beside those that `GroupOps` take: all, on a CPU; those of four-bit floats, on a GPU; or none.
KeptCodes = Literal["all", "four bits"] | None


class _Kept(NamedTuple):
    """A part in the form in which codes are computed."""

    kind: object  # what neighbours in one layer have in common
    part: Coded | Grouped
    order: Tensor | None = None  # in which its layer takes inputs, where that is not the kernel's part


class CodeLayers:
    def __init__(
        self,
        kept: KeptCodes,
        ops: GroupOps | None,
        has_eight_bits: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kept, self._ops, self._has_eight_bits = kept, ops, has_eight_bits
        self._dtype, self._device = dtype, device
        self.num_bytes = 0  # of codes and their scales
        self._lock = threading.Lock()

    def layer(
        self, parts: Sequence[Part], bias: Tensor | None, plain: Callable[[Sequence[Part], Tensor | None], Linear]
    ) -> Linear | None:
        """The parts' outputs side by side, neighbours of one kind in one layer; `plain` makes those of numbers. None
        where all are numbers."""
        kept = [self._form(part) for part in parts]
        if not any(kept):
            return None
        layers: list[Linear] = []
        row = 0
        for kind, run in groupby(zip(parts, kept, strict=True), key=lambda pair: pair[1] and (pair[1].kind,)):
            given = list(run)
            rows = sum(part.shape[0] for part, _ in given)
            added = None if bias is None else bias[row : row + rows]
            if kind:
                layers.append(self._of_codes([form for _, form in given if form is not None], added))
            else:
                layers.append(plain([part for part, _ in given], added))
            row += rows
        return layers[0] if len(layers) == 1 else SideBySide(layers)

    def table(self, part: Part) -> CodedLinear | GroupedLinear | None:
        form = self._form(part)
        layer = None if form is None else self._of_codes([form], None)
        return layer if isinstance(layer, CodedLinear | GroupedLinear) else None

    def _form(self, part: Part) -> _Kept | None:
        """None: numbers."""
        if isinstance(part, WeightPart):
            return None
        if self._kept == "all":
            order = part.order if isinstance(part, Grouped) else None
            coded = part.coded() if isinstance(part, Grouped) else part
            return None if coded is None else _Kept(None if order is None else order.numpy().tobytes(), coded, order)
        if isinstance(part, Coded) and part.type.name == "MXFP4":
            return None if self._kept is None else _Kept("four bits", part)
        groups = as_groups(part) if isinstance(part, Coded) else part
        if self._ops is None or groups is None or half_of(groups) is None:
            return None
        # Cards whose registers have no floats of eight bits have no products of them either.
        return None if groups.is_float and not self._has_eight_bits else _Kept(kind_of(groups), groups)

    def _of_codes(self, run: Sequence[_Kept], bias: Tensor | None) -> Linear:
        """Of one kind."""
        grouped = [form.part for form in run if isinstance(form.part, Grouped)]
        if grouped:
            assert self._ops is not None
            weight = pack(grouped, self._device)
            self._count(weight.tensors())
            return GroupedLinear(weight, bias, self._ops, self._dtype)
        coded, order = [form.part for form in run if isinstance(form.part, Coded)], run[0].order
        layer: CodedLinear | FourBitLinear
        if self._kept == "four bits":
            layer = FourBitLinear(coded, self._dtype, self._device, bias)
        else:
            layer = CodedLinear(coded, self._dtype, bias)
        self._count([tensor for tensor in layer.tensors() if tensor.dtype is torch.uint8])
        return Reordered(layer, order) if isinstance(layer, CodedLinear) and order is not None else layer

    def _count(self, tensors: Iterable[Tensor]) -> None:
        with self._lock:
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
