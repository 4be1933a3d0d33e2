"""Adapters of the experts of small random models, in both ways that PEFT writes them, and the models with them merged."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.adapters import Factors, merged, random_factors, write
from tests.support.small_models import reference

SHARED = ("q_proj", "shared_expert.gate_proj", "shared_experts.gate_proj", "shared_expert.down_proj")
# What checkpoints call it where transformers says `mlp.experts` and gate, up and down.
NAMES = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}


class ExpertAdapter:
    """Changes all experts and, by `targets`, other modules. A stack has one A for gate and up, modules one for each."""

    def __init__(
        self,
        case: str,
        path: Path,
        seed: int,
        is_stacked: bool,
        targets: tuple[str, ...] = SHARED,
        rank: int = 3,
        alpha: float = 5.0,
        dtype: torch.dtype = torch.float32,
        only: tuple[str, ...] = ("gate_up_proj", "down_proj"),
        version: str = "0.21.2",
    ) -> None:
        self._made = torch.Generator().manual_seed(seed)
        self._rank, self._dtype, self._case = rank, dtype, case
        chosen = {
            name: pair
            for name, pair in random_factors(
                reference(case), tuple({t.split(".")[-1] for t in targets}), rank, seed, dtype
            ).items()
            if name.endswith(targets)
        }
        self._model = merged(case, chosen, alpha / rank)
        factors: Factors = dict(chosen)
        for name, module in self._model.named_modules():
            if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
                factors |= self._change(name, module, is_stacked, only, alpha / rank, version)
        said = {"target_parameters": [f"experts.{name}" for name in only]} if is_stacked else {}
        self.path = write(path, factors, rank, alpha, **said, peft_version=version)

    @torch.no_grad()
    def _change(
        self, name: str, module: Any, is_stacked: bool, only: tuple[str, ...], scale: float, version: str
    ) -> Factors:
        found: Factors = {}
        is_turned = getattr(module, "is_transposed", False)
        for depth, parameter in enumerate(reversed(only)):
            weight = getattr(module, parameter)
            num, outputs, inputs = weight.mT.shape if is_turned else weight.shape
            parts = 2 if parameter == "gate_up_proj" and not is_stacked else 1
            pairs = [self._pair(num, outputs // parts, inputs) for _ in range(parts)]
            change = scale * torch.cat([up.float() @ down.float() for down, up in pairs], 1)
            weight += change.mT if is_turned else change
            if is_stacked:
                down, up = pairs[0]
                if (not is_turned and version < "0.20") or (is_turned and version.startswith("0.19")):
                    down, up = up.mT, down.mT
                down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
                found[name + ".base_layer" * depth] = down, up
                continue
            block, words = NAMES.get(self._case, ("", ("gate_proj", "up_proj", "down_proj")))
            for word, (down, up) in zip(words[:2] if parts == 2 else words[2:], pairs, strict=True):
                where = name.replace("mlp.", f"{block}.") if block else name
                found |= {f"{where}.{index}.{word}": (down[index], up[index]) for index in range(num)}
        return found

    def _pair(self, num: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        down = torch.randn(num, self._rank, inputs, generator=self._made) * inputs**-0.5
        up = torch.randn(num, outputs, self._rank, generator=self._made) * self._rank**-0.5
        return down.to(self._dtype), up.to(self._dtype)

    @torch.no_grad()
    def tokens(self, prompt: list[int], count: int) -> list[int]:
        out = self._model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        found: list[int] = out[0, len(prompt) :].tolist()
        return found
