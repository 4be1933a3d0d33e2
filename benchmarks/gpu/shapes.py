"""Configurations of the measured models, as in config.json, and reduced versions that a test computes on a CPU.

python -m benchmarks.gpu.shapes qwen3-8b DIR      (a folder for servers that are started with random weights)
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960},
    "qwen3-8b": _QWEN3
    | {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960},
    "llama-3.1-8b": LLAMA
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000.0}
    | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336, "tie_word_embeddings": False}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072}
    | {"rms_norm_eps": 1e-5},
    "deepseek-v2-lite": LLAMA
    | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102_400}
    | {"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10_944, "tie_word_embeddings": False}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 163_840}
    | {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408}
    | {"first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax", "rope_theta": 10_000.0}
    | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "qwen3-30b-a3b": _QWEN3
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False}
    | {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40_960}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
    | {"mlp_only_layers": []},
}

# Two models that are measured on a CPU (benchmarks/peers.py): Qwen3.5-0.8B's text model, and gpt-oss-20b with 4 of its
# 24 layers and 16 of its 32 experts, unquantized.
HYBRID: dict[str, Any] = (
    {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248_320}
    | {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3584, "tie_word_embeddings": True}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262_144}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "full_attention_interval": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    | {"torch_dtype": "bfloat16"}
)
GPT_OSS: dict[str, Any] = (
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088, "swiglu_limit": 7.0}
    | {"num_hidden_layers": 4, "hidden_size": 2880, "intermediate_size": 2880, "tie_word_embeddings": False}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072}
    | {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_theta": 150_000, "torch_dtype": "bfloat16"}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096}
    }
)

# Seconds for each whole model, in the order of measuring; what has not been reported by then is missing.
LIMITS = {"qwen3-0.6b": 45, "llama-3.1-8b": 60, "deepseek-v2-lite": 65, "qwen3-30b-a3b": 95, "qwen3-8b": 95}

_TINY = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def config_of(name: str, is_tiny: bool) -> dict[str, Any]:
    config = dict(MODELS[name])
    if not is_tiny:
        return config
    tiny = config | {key: value for key, value in _TINY.items() if key in config}
    if "kv_lora_rank" in tiny:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return tiny


@contextmanager
def model_folder(config: dict[str, Any]) -> Iterator[str]:
    """Write a folder with only a configuration, which suffices for random weights."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def decode_bytes(config: dict[str, Any], weight_bytes: int, itemsize: int, batch: int) -> int:
    """Return the bytes of weights that one step reads at least: everything, except that of the experts only those
    chosen by some row count, estimated for rows that choose at random."""
    experts = config.get("num_experts") or config.get("n_routed_experts")
    table = 0 if config.get("tie_word_embeddings", True) else config["vocab_size"] * config["hidden_size"] * itemsize
    if not experts:
        return weight_bytes - table
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    size = 3 * config["moe_intermediate_size"] * config["hidden_size"] * itemsize
    missed = experts * (1 - config["num_experts_per_tok"] / experts) ** batch
    return weight_bytes - table - int(layers * missed * size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that decodes every token to a text, for servers that are asked with token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(len(symbols), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate([*symbols, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[-1]).save_pretrained(folder)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    write_tokenizer(folder, MODELS[name]["vocab_size"])
