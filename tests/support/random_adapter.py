"""Writes a small random LoRA adapter in PEFT's format for the default model; it changes the answers."""

import json
from pathlib import Path

import numpy as np

from penstock.engine.model_files import resolve_model
from penstock.executor.gguf_header import GgufHeader

RANK, SCALE, SEED = 2, 0.5, 0
MODULE = "model.layers.{}.self_attn.o_proj"


def write_adapter(folder: Path) -> None:
    """Write an adapter for the default model, with the shapes from its GGUF file."""
    metadata = GgufHeader(resolve_model().path).metadata
    name = metadata["general.architecture"]
    width, num_layers = metadata[f"{name}.embedding_length"], metadata[f"{name}.block_count"]
    generator = np.random.default_rng(SEED)
    tensors = {}
    for layer in range(num_layers):
        for matrix, shape in (("A", (RANK, width)), ("B", (width, RANK))):
            values = generator.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
            tensors[f"base_model.model.{MODULE.format(layer)}.lora_{matrix}.weight"] = values
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    head, data = {}, b""
    for name, values in tensors.items():
        place = [len(data), len(data) + values.nbytes]
        head[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": place}
        data += values.tobytes()
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data
