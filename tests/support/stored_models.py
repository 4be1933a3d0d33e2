"""Small models by name, however they are stored: the checkpoint, and transformers' model of the same numbers.

A name is a small model's, one of packed_models.py ("awq-32"), "blocks/qwen3" for eight bits with a scale per block,
"mxfp4/gpt-oss", or "gguf/llama" for a file of gguf_files.py.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import gguf_files, packed_models, small_models
from tests.support.checkpoints import WEIGHTS, edit_config
from tests.support.small_models import SEEING, folder, place_for, random_model, reference

IMPLIED = ("gemma3", "ministral3", "mistral")  # their text config is wrong about a tied head; transformers ignores it


@cache
def stored(name: str) -> tuple[Path, Any]:
    """Return the path of the checkpoint and transformers' model."""
    kind, _, case = name.rpartition("/")
    path = place_for(f"stored {name.replace('/', '-')}")
    if kind == "gguf":
        return gguf_files.written(case, path.with_suffix(".gguf"))
    if kind == "mxfp4":
        return _mxfp4(case, path)
    if kind == "blocks" or name in packed_models.CASES:
        return packed_models.folders(case)[0], packed_models.oracle(case)
    return folder(name), reference(name)


def greedy(name: str, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates with the numbers of the checkpoint."""
    return small_models.generated(name, stored(name)[1], prompt, count)[0]


@torch.no_grad()
def _mxfp4(case: str, path: Path) -> tuple[Path, Any]:
    """Store random codes for the experts, as OpenAI's checkpoint does; transformers' own reader makes the numbers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(folder(case), path)
    model = random_model(*small_models.CASES[case])
    tensors = load_file(path / WEIGHTS)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, depth, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, depth // 32, 16), generator=generator).byte()
        scales = torch.randint(119, 124, (experts, rows, depth // 32), generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    kept = ["lm_head", "model.layers.*.mlp.router"]
    edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return path, model


def text_of_images(case: str, path: Path, inner: str = "model.language_model.", outer: str = "") -> Path:
    """Store a model as the text part of one that sees: under other names, beside tensors of other parts.

    Experts are in one tensor for each product, and layers that read others' keys have nevertheless some of their own.
    """
    path.mkdir()
    tensors = {
        inner + name.removeprefix("model.") if name.startswith("model.") else outer + name: tensor
        for name, tensor in load_file(folder(case) / WEIGHTS).items()
    }
    for layer in sorted({name.split(".experts.")[0] for name in tensors if ".experts.0." in name}):
        products: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for number in range(small_models.EXPERTS["num_experts"]):
            own = [tensors.pop(f"{layer}.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
            products["gate_up_proj"].append(torch.cat(own[:2]))
            products["down_proj"].append(own[2])
        tensors |= {f"{layer}.experts.{name}": torch.stack(parts) for name, parts in products.items()}
    text = json.loads((folder(case) / "config.json").read_text())
    if case in IMPLIED:
        text["tie_word_embeddings"] = case == "mistral"
    others = ["vision_tower.a.weight", "model.multi_modal_projector.norm.weight"]
    if case.startswith("qwen3.5"):
        others = ["model.visual.blocks.0.norm.weight", "mtp.layers.0.norm.weight"]
    if case == "gemma4":
        text["global_head_dim"] = text.pop("per_layer_config")["2"]["head_dim"]
        for part, size in (("k_proj", (32, 64)), ("v_proj", (32, 64)), ("k_norm", (16,))):
            tensors[f"{inner}layers.4.self_attn.{part}.weight"] = torch.full(size, float("nan"))
    save_file(tensors | {name: torch.ones(2) for name in others}, path / WEIGHTS, metadata={"format": "pt"})
    config = {"architectures": [SEEING[case]], "text_config": text, "vision_config": {}, "dtype": text.pop("dtype")}
    (path / "config.json").write_text(json.dumps(config))
    return path
