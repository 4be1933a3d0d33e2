"""GGUF files of the families beside Llama: the converter's names and keys, and the tokens of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.loading.gguf_config import FAMILIES
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_gguf import permute, write
from tests.executor.test_models import prompts
from tests.support.driver import Driver
from tests.support.small_models import greedy, reference

CASES = {
    "ernie4.5-plain": "ernie4_5",
    "glm4": "glm4",
    "granite": "granite",
    "hunyuan": "hunyuan-dense",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "seed-oss": "seed_oss",
    "smollm3": "smollm3",
}


def written(path: Path, case: str, **changes: Any) -> Path:
    """As llama.cpp's converter writes the model: names by the gguf package's own map."""
    architecture = CASES[case]
    model = reference(case)
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    theta = rope["rope_theta"] * rope.get("alpha", 1.0) ** (dim / (dim - 2))
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": theta,
        "rope.dimension_count": int(dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if architecture not in ("phi3", "granite"):
        keys["attention.key_length"] = dim
    if architecture == "granite":
        keys |= {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
        keys |= {"embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier}
    factors = {}
    if architecture == "phi3":
        keys["attention.sliding_window"] = config.sliding_window or 0
    if "long_factor" in rope:
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        factors = {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], "<f4") for kind in ("long", "short")}
    full = {f"{architecture}.{key}": value for key, value in (keys | changes).items()}
    tokens = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(config.vocab_size)]}
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {name: (values, "F32") for name, values in factors.items()}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = values.numpy()
        if FAMILIES[architecture].is_permuted and (".q_proj." in name or ".k_proj." in name):
            stored = permute(stored, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensors[found] = (np.ascontiguousarray(stored), "F32")
    return write(path, architecture, full | tokens, tensors)


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_a_family_gives_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", case)
    prompt = prompts(1, low=30, high=30)[0]
    driver = Driver(UniprocExecutor(ExecutorConfig(model=str(path), kv_cache_bytes=2**22, dtype="float32")))
    assert driver.generate(driver.admit(prompt), count=20, chunk=7) == [greedy(case, prompt, 20)[0]]


def test_what_a_family_does_not_have_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=r"olmo2\.attention\.sliding_window: 16 found; at least the context 256"):
        GgufCheckpoint(written(tmp_path / "a.gguf", "olmo2", **{"attention.sliding_window": 16}))
    with pytest.raises(ExecutorError, match=r"smollm3\.residual_scale: 0\.5 found; None or 0 is expected"):
        GgufCheckpoint(written(tmp_path / "b.gguf", "smollm3", residual_scale=0.5))
    with pytest.raises(ExecutorError, match=r"glm4\.rope\.dimension_count: 26 found; an integer from 1 to 24"):
        GgufCheckpoint(written(tmp_path / "c.gguf", "glm4", **{"rope.dimension_count": 26}))
