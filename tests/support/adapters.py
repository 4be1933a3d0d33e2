"""PEFT adapters of small random models, written as PEFT writes them, and the same models with the adapters merged by hand."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.executor.kernels.lora import LoraSlots
from penstock.executor.models.adapters import AdapterStore
from penstock.executor.protocol import ExecutorConfig
from tests.support.driver import Driver
from tests.support.small_models import generated, greedy, reference
from tests.support.twins.lora import add_lora

PREFIX = "base_model.model."
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PEFT_CONFIG = json.loads(Path(__file__).with_name("adapter_config.json").read_text())  # as PEFT writes it
Factors = dict[str, tuple[Tensor, Tensor]]  # module → A, B


def random_factors(model: Any, targets: tuple[str, ...], rank: int, seed: int, dtype: torch.dtype) -> Factors:
    """Return factors as large as the weights that they change, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            (torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5).to(dtype),
            (torch.randn(module.out_features, rank, generator=generator) * rank**-0.5).to(dtype),
        )
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear)
    }


def check_shared_steps(executor: Any, case: str, adapters: Sequence[Any], prompts: list[list[int]], count: int) -> None:
    """Run requests with each adapter in turn, and with none, in the same steps; then the first of them alone."""
    driver = Driver(executor)
    keys = [*(executor.load_adapter(str(adapter.path)).key for adapter in adapters), None]
    chosen = [index % len(keys) for index in range(len(prompts))]
    running = [driver.admit(prompt, adapter=keys[at]) for prompt, at in zip(prompts, chosen, strict=True)]
    got = driver.generate(*running, count=count, chunk=7)
    for index, (prompt, at, tokens) in enumerate(zip(prompts, chosen, got, strict=True)):
        expected = greedy(case, prompt, count)[0] if keys[at] is None else adapters[at].tokens(prompt, count)
        assert tokens == expected, f"{case}, request {index}"
    assert driver.generate(driver.admit(prompts[0], adapter=keys[0]), count=count) == [got[0]]


def keep_in_slots(patch: pytest.MonkeyPatch) -> None:
    """Let models that are opened from now on keep adapters as on a GPU: copied to few slots of one size, layer by layer."""

    class SlotStore(AdapterStore):
        def __init__(self, config: ExecutorConfig, *parts: Any) -> None:
            super().__init__(config, *parts)
            self._weights = LoraSlots(self._shapes, config.max_loras, config.max_lora_rank, *parts[-2:])

    patch.setattr("penstock.executor.models.load.AdapterStore", SlotStore)
    patch.setattr("penstock.executor.kernels.lora._load_kernel", lambda: add_lora)
    patch.setattr("penstock.executor.models.decoder.join_layers", lambda *_: None)  # it takes no slots


def write(path: Path, factors: Factors, rank: int, alpha: float, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    fields = PEFT_CONFIG | {"r": rank, "lora_alpha": alpha}
    fields["target_modules"] = sorted({name.rpartition(".")[2] for name in factors})
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    pairs = {f"{PREFIX}{name}": pair for name, pair in factors.items()}
    tensors = {f"{name}.lora_A.weight": down.contiguous() for name, (down, _) in pairs.items()}
    save_file(
        tensors | {f"{name}.lora_B.weight": up.contiguous() for name, (_, up) in pairs.items()},
        path / "adapter_model.safetensors",
    )
    return path


@torch.no_grad()
def merged(case: str, factors: Factors, scale: float) -> Any:
    model = deepcopy(reference(case))
    for name, (down, up) in factors.items():
        model.get_submodule(name).weight += scale * (up.float() @ down.float())
    return model


class Adapter:
    """An adapter of a small model, in a folder; `tokens` are those of the merged model."""

    def __init__(
        self,
        case: str,
        path: Path,
        seed: int,
        targets: tuple[str, ...] = EVERYWHERE,
        rank: int = 4,
        alpha: float = 6.0,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> None:
        self.factors = random_factors(reference(case), targets, rank, seed, dtype)
        self.path = write(path, self.factors, rank, alpha, **config)
        self.scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        self._model = merged(case, self.factors, self.scale)

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        return generated(str(self.path), self._model, prompt, count)[0]
