"""Presents a GGUF file as a Hugging Face checkpoint: its config, tensor names and tensor values.

llama.cpp's converter renames every tensor, permutes the rows of Llama's q and k for its own RoPE, adds one to the norms
of Gemma and Qwen3.5, puts value heads of the gated delta rule into another order, and stores the decay of recurrent
layers as it is used. This module reverts all of it, so that the model loader has to support only one layout.
"""

import math
import re
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.gguf_header import GgufFile, open_gguf
from penstock.executor.kernels.stored_formats import Ggml
from penstock.executor.kernels.weight import CPU, Weight
from penstock.executor.loading.gguf_config import BY_TYPE, FACTORS, TABLES, config_of
from penstock.executor.protocol import ExecutorError


class _Order(NamedTuple):
    """The order of rows in the file, or of columns, from `start` on. Our tensor has the units of a group, which are `size`
    rows each, as neighbours; the file has the first units of all groups, then their second ones, and so on."""

    repeats: int  # parts of the tensor that have such groups each; unused for columns: there, each row has them
    groups: int
    size: int = 1
    start: int = 0
    of_columns: bool = False

    def divides(self, shape: tuple[int, ...]) -> bool:
        num = shape[-1 if self.of_columns else 0] - self.start
        return num >= 0 and num % (self.repeats * self.groups * self.size) == 0

    def restored(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of a matrix of this shape, which are numbers or bytes without a dimension, in our order."""
        width = rows.numel() // shape[0]
        repeats, unit = self.repeats, self.size * width
        if self.of_columns:
            repeats, unit = shape[0], unit // shape[1]
        moved = rows[self.start * width :].view(repeats, -1, self.groups, unit).transpose(1, 2)
        return torch.cat((rows[: self.start * width], moved.reshape(-1)))


class _Source(NamedTuple):
    """The tensor of the file that contains an HF tensor, and how the converter changed it."""

    name: str
    order: _Order | None = None
    plus_one: bool = False
    expert: tuple[int, int] | None = None  # (index, count): the file's tensor stacks `count` tensors
    parts: tuple[str, ...] = ()  # the tensors of transposed keys and of values per head; then `name` is unused
    change: Callable[[Tensor], Tensor] | None = None  # computes our numbers from those of the file


class GgufCheckpoint:
    """Implements `Checkpoint` for a GGUF file. Quantized matrices are read without dequantizing them.

    Raises ExecutorError for a tensor that the architecture does not have. Shapes are those of the file; the loader compares
    them, and notices missing tensors and those of features that the config does not have.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_gguf(path)
        self.config: dict[str, Any] = config_of(self._file)
        self.has_codes = any(entry.type.is_quantized for entry in self._file.tensors.values())
        self._sources = _sources(self.config, self._file)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape(self._sources[name])

    def _shape(self, source: _Source) -> tuple[int, ...]:
        if source.parts:
            (heads, rank, nope), (_, value, _) = (self._file.tensors[part].shape for part in source.parts)
            return heads * (nope + value), rank
        shape = self._file.tensors[source.name].shape
        if source.change is not None:
            return tuple(source.change(torch.empty(shape, device="meta")).shape)
        return shape if source.expert is None else shape[1:]

    def read(self, name: str) -> Tensor | Weight:
        return self._read(self._sources[name])

    def _read(self, source: _Source) -> Tensor | Weight:
        if source.parts:
            keys, values = (self._float_tensor(_Source(part)) for part in source.parts)
            return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        if source.change is not None:
            return source.change(self._float_tensor(source._replace(change=None)))
        entry, shape = self._file.tensors[source.name], self._shape(source)
        index, of = source.expert or (0, 1)
        size = entry.size_bytes // of
        raw = torch.frombuffer(self._file.data, dtype=torch.uint8, count=size, offset=entry.offset + index * size)
        if (order := source.order) is not None:
            if order.of_columns and order.size % entry.type.block:  # a block of codes has columns of several units
                numbers = self._float_tensor(source._replace(order=None))
                return order.restored(numbers.flatten(), shape).view(shape)
            raw = order.restored(raw, shape)
        if not entry.type.is_quantized:
            values = raw.view(_FLOATS[entry.type.name]).view(shape)
        else:
            rows = raw.view(math.prod(shape[:-1]), -1)
            weight = Weight(Ggml(entry.type), rows, name=source.name)
            if len(shape) > 1 and not source.plus_one:
                return weight
            values = weight.dequantize(CPU, torch.float32).view(shape)
        return values - 1 if source.plus_one else values

    def _float_tensor(self, source: _Source) -> Tensor:
        """Return a tensor of the file as numbers, in its own shape."""
        read = self._read(source)
        values = read.dequantize(CPU, torch.float32) if isinstance(read, Weight) else read.float()
        return values.view(self._file.tensors[source.name].shape)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
# The file has these in another form: a vector in place of a matrix of one row, the decay instead of its logarithm, or a
# dimension more or less.
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shared_expert_gate.weight": lambda vector: vector.reshape(1, -1),
    ".A_log": lambda decay: decay.neg().log().flatten(),
    **dict.fromkeys((".D", "mixer.norm.weight", "mamba.norm.weight"), Tensor.flatten),
    **dict.fromkeys((".conv1d.weight", ".conv.weight"), lambda taps: taps.unsqueeze(1)),
}


def _sources(config: dict[str, Any], file: GgufFile) -> dict[str, _Source]:
    """Return HF name → source for every tensor of the file, except those of layers that only draft."""

    def error(name: str, reason: str) -> ExecutorError:
        return ExecutorError(f"{file.path}: tensor {name[:80]!r} {reason}")

    family, num_layers = BY_TYPE[config["model_type"]], config["num_hidden_layers"]
    names = ChainMap(*(TABLES.names[group] for group in (*reversed(family.names), "llama")))
    orders, num_experts = _orders(config), next((config[key] for key in _EXPERT_COUNTS if key in config), 0)
    sources: dict[str, _Source] = {}
    for name in sorted(file.tensors.keys() - {"rope_freqs.weight", *FACTORS}):
        shape, place = file.tensors[name].shape, re.fullmatch(r"blk\.(\d{1,5})\.(.*)", name)
        ours = TABLES.names["model"].get(name) if place is None else names.get(place[2])
        index = -1 if place is None else int(place[1])
        if num_layers <= index < num_layers + config["num_nextn_predict_layers"]:
            continue
        if ours is None or index >= num_layers:
            raise error(name, "is not part of a model of this architecture")
        order = next((order for end, order in orders.items() if ours.endswith(end)), None)
        if order is not None and not order.divides(shape):
            raise error(name, f"has shape {shape}, which the model's heads do not divide")
        change = next((change for end, change in _CHANGES.items() if ours.endswith(end)), None)
        has_one = family.plus_one and ours.endswith("norm.weight") and not ours.startswith("linear_attn.")
        source = _Source(name, order, has_one, change=change)
        ours = ours if place is None else f"model.layers.{index}.{ours}"
        if "#" in ours:
            if shape[0] != num_experts:
                raise error(name, f"has shape {shape}; the metadata says {num_experts} experts")
            for expert in range(num_experts):
                sources[ours.replace("#", str(expert))] = source._replace(expert=(expert, num_experts))
        elif ours not in sources:
            sources[ours] = source
        elif name.endswith("attn_v_b.weight"):
            keys = sources[ours].name
            heads = file.tensors[keys].shape
            if not (len(shape) == len(heads) == 3 and heads[:2] == shape[::2]):
                raise error(keys, f"has shape {heads}; those of the values are {shape}")
            sources[ours] = source._replace(parts=(keys, name))
        else:
            raise error(name, f"and {sources[ours].name!r} are both {ours}")
    return sources


def _orders(config: dict[str, Any]) -> dict[str, _Order]:
    """Return the tensors, by the ends of their HF names, whose rows or columns have another order in the file."""
    family, orders = BY_TYPE[config["model_type"]], dict[str, _Order]()
    if family.is_permuted:  # the rows i and i + dim/2 of a head are neighbours
        for part, num_heads in {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}.items():
            orders |= dict.fromkeys((f"{part}_proj.weight", f"{part}_proj.bias"), _Order(num_heads, 2))
    heads, all_heads = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads", 1)
    if heads != all_heads:  # value head i uses key head i modulo their number; with us, neighbours share one
        keys, size = 2 * heads * config["linear_key_head_dim"], config["linear_value_head_dim"]
        orders |= dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), _Order(1, heads))
        orders |= dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), _Order(1, heads, size, keys))
        orders["in_proj_z.weight"] = _Order(1, heads, size)
        orders["linear_attn.out_proj.weight"] = _Order(1, heads, size, of_columns=True)
    return orders
