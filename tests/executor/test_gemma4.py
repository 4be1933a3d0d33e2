"""Gemma 4 as its checkpoints are: a text model within one of images, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.support.driver import Driver
from tests.support.small_models import REFUSED, folder, greedy

PROMPT = [5, 17, 3, 99, 42, 8, 71, 150, 20, 11, 90, 64, 33]


def executor_of(path: Path, **options: Any) -> UniprocExecutor:
    given = {"kv_cache_bytes": 2**22, "block_size": 8, "device": "cpu", "dtype": "float32", **options}
    return UniprocExecutor(ExecutorConfig(model=str(path), **given))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as the published ones are: under other names, beside a vision tower, and with the keys that
    layers which read others' have nevertheless."""
    path = tmp_path_factory.mktemp("models") / "gemma4-images"
    path.mkdir()
    tensors = load_file(folder("gemma4") / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for part, size in (("k_proj", (32, 64)), ("v_proj", (32, 64)), ("k_norm", (16,))):
        tensors[f"model.language_model.layers.4.self_attn.{part}.weight"] = torch.full(size, float("nan"))
    tensors["model.vision_tower.patch_embedder.weight"] = torch.zeros(4, 4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder("gemma4") / "config.json").read_text())
    full = text.pop("per_layer_config")["2"]["head_dim"]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": "float32",
        "text_config": text | {"global_head_dim": full},
        "vision_config": {"hidden_size": 4},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_text_part_of_a_multimodal_checkpoint_gives_the_same_tokens(multimodal: Path) -> None:
    driver = Driver(executor_of(multimodal))
    assert driver.generate(driver.admit(PROMPT), count=16, chunk=5) == [greedy("gemma4", PROMPT, 16)[0]]


def test_layers_that_read_others_keys_take_no_pages() -> None:
    """Six layers, of which two read others' keys; the widest has two heads of 32."""
    info = executor_of(folder("gemma4")).info
    assert info.block_bytes * len(info.groups) == 4 * 2 * 8 * 64 * 4  # a layer in a page of each group
    assert info.num_blocks == 2**22 // info.block_bytes


@pytest.mark.parametrize(("overrides", "words"), REFUSED["gemma4"])
def test_what_is_not_computed_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ExecutorError, match=words):
        executor_of(folder("gemma4"), hf_overrides=overrides)
