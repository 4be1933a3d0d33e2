"""Converts the names and layout of a family's tensors to those that the decoder reads.

The decoder knows one layout, that of Llama: one tensor for each projection of each expert, rotated pairs (i, i + half).
`Arranged` presents a checkpoint in this layout, and reads a tensor only when it is requested.

A joined MXFP4 weight consists of two tensors, as in gpt-oss: `x_blocks` [experts, rows, depth / 32, 16] with two codes
per byte and `x_scales` [experts, rows, depth / 32] with exponents of two. They are converted to the rows of GGUF, where
a byte has the codes i and i + 16 of 32 neighbours instead of 2 i and 2 i + 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.code_types import CODE_TYPES
from penstock.executor.kernels.stored_formats import BLOCK, Ggml
from penstock.executor.kernels.weight import EIGHT_BITS, Weight
from penstock.executor.loading.checkpoint import Checkpoint
from penstock.executor.protocol import ExecutorError

# Prefixes of the text part of multimodal checkpoints (transformers 5 and earlier), with their replacements.
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_", "lm_"))
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_BLOCKS = "_blocks"
_OTHER_SENSES = ("vision_tower.", "multi_modal_projector.")
# (part of a stored name, weights whose rows the tensor concatenates), each weight as (part of our name, relative number
# of rows). A # in our names stands for the expert's number; the tensor then has a leading expert dimension.
Joined = tuple[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Arrangement:
    renames: tuple[tuple[str, str], ...] = ()  # (part of a stored name, replacement), applied in order
    joined: tuple[Joined, ...] = ()
    alternating: tuple[str, ...] = ()  # parts of names of joined tensors whose weights' rows alternate
    transposed: tuple[str, ...] = ()  # name suffixes of joined tensors whose experts' matrices are transposed
    # (head size, rotated dimensions) if rotated pairs of queries and keys are stored as neighbours, (2i, 2i + 1).
    neighbours: tuple[int, int] | None = None
    single: tuple[str, ...] = ()  # parts of names of tensors [1, n] that are read as [n]
    ignored: tuple[str, ...] = ()  # name prefixes of tensors that are not used


AS_LLAMA = Arrangement()


class _Location(NamedTuple):
    """The location of a tensor: the stored tensor, the expert, and the rows of its matrix, which is transposed if
    `is_transposed`. Without a shape it is the whole stored tensor."""

    name: str
    shape: tuple[int, ...] | None = None
    expert: int | None = None
    start: int = 0
    step: int = 1
    is_transposed: bool = False


class Arranged:
    """A view of another checkpoint with the tensor names and shapes of Llama."""

    def __init__(self, checkpoint: Checkpoint, arrangement: Arrangement) -> None:
        self._inner, self._arrangement = checkpoint, arrangement
        self.config: dict[str, Any] = checkpoint.config
        self.has_codes = checkpoint.has_codes
        names = checkpoint.names()
        scales = {_scales_of(name) for name in names if name.endswith(_BLOCKS)}
        self._locations = {
            ours: location
            for name in names
            if not name.startswith(arrangement.ignored) and not name.removeprefix("model.").startswith(_OTHER_SENSES)
            if name not in scales
            for ours, location in self._parts(name)
        }

    def names(self) -> list[str]:
        return list(self._locations)

    def shape(self, name: str) -> tuple[int, ...]:
        location = self._locations[name]
        return self._inner.shape(location.name) if location.shape is None else location.shape

    def origin(self, name: str) -> str:
        """Return the name of the stored tensor that contains this one."""
        return self._locations[name].name

    def read(self, name: str) -> Tensor | Weight:
        location = self._locations[name]
        stored = _cut(self._inner.read(location.name), location)
        if location.shape is not None and location.name.endswith(_BLOCKS):
            scales = _cut(self._inner.read(_scales_of(location.name)), location)
            assert isinstance(stored, Tensor) and isinstance(scales, Tensor)
            stored = Weight(Ggml(CODE_TYPES["MXFP4"]), _as_gguf(stored, scales), name=name)
        return self._apart(name, stored)

    def _parts(self, name: str) -> Iterator[tuple[str, _Location]]:
        """Yield the decoder's names for the parts of a stored tensor, with the location of each part."""
        ours = name
        for old, new in (*_PREFIXES, *self._arrangement.renames):
            ours = ours.replace(old, new)
        for joined, parts in self._arrangement.joined:
            if f".{joined}." in f"{ours}.":
                yield from ((ours.replace(joined, part), location) for part, location in self._split(name, parts))
                return
        is_single = any(part in name for part in self._arrangement.single)
        yield ours, _Location(name, self._inner.shape(name)[1:], expert=0) if is_single else _Location(name)

    def _split(self, name: str, parts: tuple[tuple[str, int], ...]) -> Iterator[tuple[str, _Location]]:
        shape = self._inner.shape(name)
        if math.prod(shape) == 1:  # one scale for all parts
            yield from ((part, _Location(name)) for part, _ in parts)
            return
        if name.endswith(_BLOCKS):
            shape = self._coded_shape(name)
        if is_transposed := name.endswith(self._arrangement.transposed):
            shape = (shape[0], *shape[:0:-1])
        is_stacked = "#" in parts[0][0] and len(shape) > 1
        experts, (rows, *columns) = (range(shape[0]), shape[1:]) if is_stacked else ((None,), shape)
        unit, rest = divmod(rows, sum(size for _, size in parts))
        if rest:
            names, sizes = ", ".join(part for part, _ in parts), ":".join(str(size) for _, size in parts)
            raise ExecutorError(f"tensor {name!r} of shape {list(shape)}: its rows are not {names} as {sizes}")
        start, step = 0, len(parts) if any(part in name for part in self._arrangement.alternating) else 1
        for part, size in parts:
            location = _Location(name, (size * unit, *columns), None, start, step, is_transposed)
            for expert in experts:
                yield part.replace("#", str(expert)), location._replace(expert=expert)
            start += size * unit if step == 1 else 1

    def _coded_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dequantized weight."""
        shape, scales = self._inner.shape(name), _scales_of(name)
        if len(shape) != 4 or shape[-1] != 16:
            raise ExecutorError(f"tensor {name!r} of shape {list(shape)}: [experts, rows, depth / 32, 16] is expected")
        found, expected = list(self._inner.shape(scales)) if scales in self._inner.names() else None, list(shape[:-1])
        if found != expected:
            raise ExecutorError(f"tensor {scales!r} of shape {expected} is expected, {found or 'none'} found")
        return (*shape[:-2], 32 * shape[-2])

    def _apart(self, name: str, stored: Tensor | Weight) -> Tensor | Weight:
        """Reorder rotated pairs from (2i, 2i + 1) to (i, i + half), in queries and keys alike, which keeps q · k."""
        if self._arrangement.neighbours is None or not name.endswith(_ROTATED):
            return stored
        dim, rotated = self._arrangement.neighbours
        is_scaled = isinstance(stored, Tensor) and stored.dtype is EIGHT_BITS
        if is_scaled and (rotated > BLOCK or (BLOCK % dim and dim % BLOCK)):
            raise ExecutorError(
                f"tensor {name!r}: heads of {dim}, {rotated} rotated; that is not within blocks of {BLOCK} with a scale each"
            )
        head = torch.cat((torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, dim)))
        order = (torch.arange(0, stored.shape[0], dim)[:, None] + head).flatten()
        return stored.take(order) if isinstance(stored, Weight) else stored[order]


def _cut(stored: Tensor | Weight, location: _Location) -> Tensor | Weight:
    if location.expert is not None:
        assert isinstance(stored, Tensor)
        stored = stored[location.expert].T if location.is_transposed else stored[location.expert]
    if location.step > 1:
        assert isinstance(stored, Tensor)
        return stored[location.start :: location.step]
    return stored if location.shape is None else stored.narrow(0, location.start, location.shape[0])


def _scales_of(name: str) -> str:
    return f"{name.removesuffix(_BLOCKS)}_scales"


def _as_gguf(blocks: Tensor, scales: Tensor) -> Tensor:
    """Join blocks [rows, depth / 32, 16] and scales [rows, depth / 32] in GGUF's layout: [rows, depth / 32 * 17]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((scales[..., None], packed), dim=-1).flatten(1)
