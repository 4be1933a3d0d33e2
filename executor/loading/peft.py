"""Reads a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

The adapter adds scale · B A to the weight W of a module. Adapters that compute anything else are refused by name: fully
trained modules, DoRA, biases, changed base weights. executor/models/adapters.py checks the modules against the model.
"""

import hashlib
import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.loading.fields import RULES, Fields, read_json
from penstock.executor.loading.safetensors_folder import open_safetensors
from penstock.executor.protocol import ExecutorError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = ("F32", "BF16", "F16")
_ANYWHERE = r".*\."  # the prefix of PEFT's own patterns; the rest is the suffix of a module's name


class PeftFolder:
    """Implements `Checkpoint` for an adapter: the weight of each module is its scaled B [out, rank]."""

    has_codes = False

    def __init__(self, folder: Path, max_rank: int) -> None:
        """Open the adapter, and check all that can be checked without the model and without reading tensors."""
        self.config: dict[str, Any] = {}
        self._path = folder / WEIGHTS
        if not self._path.is_file() and (folder / "adapter_model.bin").is_file():
            raise ExecutorError(f"{folder}: adapter_model.bin is a pickle, which is never read; save as {WEIGHTS}")
        fields = Fields(read_json(folder / CONFIG), str(folder / CONFIG))
        self._config = _read_config(fields)
        self._file = open_safetensors(self._path)
        self.modules: dict[str, dict[str, str]] = {}  # module → "A" or "B" → tensor name
        for name in sorted(self._file.keys()):
            self._add(name)
        if not self.modules:
            raise ExecutorError(f"{self._path}: the adapter has no tensors")
        for module in self.modules:
            self._check(module, max_rank)

    def names(self) -> list[str]:
        return [f"{module}.weight" for module in self.modules]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name.removesuffix(".weight"), "B").get_shape())

    def down_shape(self, module: str) -> tuple[int, ...]:
        return tuple(self._slice(module, "A").get_shape())

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        scaled = self._stored[self.modules[module]["B"]].float() * self.scale(module)
        if not scaled.isfinite().all():
            raise ExecutorError(f"{self._path}: {module!r}: B scaled by {self.scale(module)} is not finite")
        return scaled

    @property
    def rank(self) -> int:
        """The largest rank among the modules."""
        return max(map(self._config.rank_of, self.modules))

    def down(self, module: str) -> Tensor:
        """Return A [rank, in] in float32."""
        return self._stored[self.modules[module]["A"]].float()

    def scale(self, module: str) -> float:
        rank = self._config.rank_of(module)
        return self._config.alpha_of(module) / (math.sqrt(rank) if self._config.is_by_root else rank)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._stored.values())

    def digest(self) -> str:
        """Return a digest of everything that affects the results: modules, tensors and scales."""
        content = hashlib.sha256()
        for module, names in self.modules.items():
            for name in names.values():
                tensor = self._stored[name].contiguous()
                content.update(
                    f"{module} {name} {tensor.dtype} {tuple(tensor.shape)} {self.scale(module)!r}\n".encode()
                )
                content.update(tensor.flatten().view(torch.uint8).numpy().data)
        return content.hexdigest()

    @cached_property
    def _stored(self) -> dict[str, Tensor]:
        """All tensors, read only once, because the digest must match them even if the file changes meanwhile."""
        stored = {name: self._file.get_tensor(name).clone() for name in sorted(self._file.keys())}
        for name, tensor in stored.items():
            if not tensor.isfinite().all():
                raise ExecutorError(f"{self._path}: tensor {name!r} has numbers that are not finite")
        return stored

    def _slice(self, module: str, factor: str) -> Any:
        return self._file.get_slice(self.modules[module][factor])

    def _add(self, name: str) -> None:
        if (match := _FACTOR.fullmatch(name)) is None:
            raise ExecutorError(
                f"{self._path}: tensor {name!r}: only lora_A.weight and lora_B.weight of modules below base_model.model "
                "can be used"
            )
        is_whole = match[1].startswith(("model.", "language_model.model."))  # the latter in older multimodal classes
        module = match[1] if is_whole else f"model.{match[1]}"
        first = self.modules.setdefault(module, {}).setdefault(match[2], name)
        if first != name:
            raise ExecutorError(
                f"{self._path}: tensors {first!r} and {name!r} are of one module; one of them is expected"
            )

    def _check(self, module: str, max_rank: int) -> None:
        names = self.modules[module]
        for factor in "AB":
            if factor not in names:
                raise ExecutorError(f"{self._path}: {module!r} has no lora_{factor}.weight")
            stored = self._slice(module, factor)
            if stored.get_dtype() not in _DTYPES or len(stored.get_shape()) != 2:
                raise ExecutorError(
                    f"{self._path}: tensor {names[factor]!r} is {stored.get_dtype()} {stored.get_shape()}; "
                    f"a matrix of {', '.join(_DTYPES)} is expected"
                )
        rank, down, up = self._config.rank_of(module), self.down_shape(module), self.shape(module)
        if not down[0] == up[1] == rank:
            raise ExecutorError(
                f"{self._path}: {module!r}: A of shape {list(down)} and B of shape {list(up)} found; "
                f"{CONFIG} says that the rank is {rank}"
            )
        if rank > max_rank:
            raise ExecutorError(f"{self._path}: {module!r} has rank {rank}; max_lora_rank is {max_rank}")


class _AdapterConfig(NamedTuple):
    """The settings in adapter_config.json; the patterns are module names or their suffixes."""

    rank: int
    alpha: float
    is_by_root: bool
    ranks: dict[str, int]
    alphas: dict[str, float]

    def rank_of(self, module: str) -> int:
        return next((rank for name, rank in self.ranks.items() if f".{module}".endswith(f".{name}")), self.rank)

    def alpha_of(self, module: str) -> float:
        return next((alpha for name, alpha in self.alphas.items() if f".{module}".endswith(f".{name}")), self.alpha)


def _read_config(fields: Fields) -> _AdapterConfig:
    RULES["peft"].check(fields)  # LoRA variants and initializations that compute something else are not allowed
    ranks, alphas = (_patterns(fields, name) for name in ("rank_pattern", "alpha_pattern"))
    config = _AdapterConfig(
        fields.integer("r"),
        fields.number("lora_alpha"),
        fields.flag("use_rslora", False),
        {name.removeprefix(_ANYWHERE): ranks.integer(name) for name in ranks.names()},
        {name.removeprefix(_ANYWHERE): alphas.number(name) for name in alphas.names()},
    )
    fields.no_others()
    return config


def _patterns(fields: Fields, name: str) -> Fields:
    patterns = fields.section(name) or Fields({})
    for pattern in patterns.names():
        # An untrusted regular expression may take forever.
        if not re.fullmatch(r"[\w.]+", pattern.removeprefix(_ANYWHERE)):
            raise fields.error(name, pattern, "a module's name, no regular expression,")
    return patterns
