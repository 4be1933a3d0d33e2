"""A checkpoint that has a layer's experts in one tensor as gpt-oss has, seen as if each had tensors of its own.

`…experts.gate_up_proj` [experts, depth, rows] holds gate and up of all, whose rows take turns, `…experts.down_proj` the
other product; biases end in `_bias`. As MXFP4 a product is two tensors, `_blocks` [experts, rows, depth / 32, 16] of two codes a byte and `_scales`
[experts, rows, depth / 32], powers of two. Its rows are then those of GGUF, where a byte has the codes i and i + 16 of
32 neighbours and not 2 i and 2 i + 1.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.kernels.codes import CODE_TYPES, Coded
from penstock.executor.kernels.grouped import Grouped
from penstock.executor.loading.checkpoint import Checkpoint

_PATTERN = re.compile(r"(.+\.experts\.)(gate_up|down)_proj(_blocks|_scales|_bias|)")


class _Stacked(NamedTuple):
    name: str  # without `_blocks`
    expert: int
    part: int | None  # 0: gate, 1: up, None: down
    is_bias: bool = False
    is_coded: bool = False


class StackedExperts:
    """The Checkpoint protocol over another one. Tensors that are no experts' pass through."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config: dict[str, Any] = checkpoint.config
        self._checkpoint = checkpoint
        self._sources: dict[str, _Stacked | None] = {}
        for name in checkpoint.names():
            found = _PATTERN.fullmatch(name)
            if found is None:
                self._sources[name] = None
            elif found[3] != "_scales":  # those are read with their blocks
                self._add(name, *found.groups())
        self.has_codes = checkpoint.has_codes or any(
            source is not None and source.is_coded for source in self._sources.values()
        )

    def _add(self, name: str, prefix: str, product: str, kind: str) -> None:
        parts = (("gate", 0), ("up", 1)) if product == "gate_up" else (("down", None),)
        suffix = "bias" if kind == "_bias" else "weight"
        base = name.removesuffix("_blocks")
        for expert in range(self._checkpoint.shape(name)[0]):
            for own, part in parts:
                source = _Stacked(base, expert, part, kind == "_bias", kind == "_blocks")
                self._sources[f"{prefix}{expert}.{own}_proj.{suffix}"] = source

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        if source is None:
            return self._checkpoint.shape(name)
        _, *shape = self._checkpoint.shape(source.name + ("_blocks" if source.is_coded else ""))
        if source.is_coded:
            shape = [shape[0], 32 * shape[1]]
        elif not source.is_bias:
            shape.reverse()
        return (shape[0] // (1 if source.part is None else 2), *shape[1:])

    def read(self, name: str) -> Tensor | Coded | Grouped:
        source = self._sources[name]
        if source is None:
            return self._checkpoint.read(name)
        if source.is_coded:
            blocks, scales = (self._rows(source, f"{source.name}{end}") for end in ("_blocks", "_scales"))
            return Coded(name, CODE_TYPES["MXFP4"], _as_gguf(blocks, scales))
        return self._rows(source, source.name)

    def _rows(self, source: _Stacked, name: str) -> Tensor:
        whole = self._checkpoint.read(name)
        assert isinstance(whole, Tensor)
        rows = whole[source.expert]
        if not (source.is_bias or source.is_coded):
            rows = rows.T
        return rows if source.part is None else rows[source.part :: 2]


def _as_gguf(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, depth / 32, 16] and [rows, depth / 32] -> [rows, depth / 32 * 17]"""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((scales[..., None], packed), dim=-1).flatten(1)
