"""From a GGUF file's metadata to the config.json that the same model has on the hub.

RoPE is written in the older spelling (`rope_theta`, `rope_scaling`), which every reader of such files knows.
What would change the numbers and cannot be expressed is refused, never ignored.
"""

import math
from typing import Any

import numpy as np

from penstock.executor.loading.fields import Fields
from penstock.executor.loading.gguf_families import FAMILIES, family_config
from penstock.executor.loading.gguf_file import GgufFile
from penstock.executor.protocol import ExecutorError

# GGUF architecture → (model_type, architectures[0]). Mistral is stored, and computed, as Llama.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    **{name: (family.model_type, family.class_name) for name, family in FAMILIES.items()},
}
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24  # tables of this length are built from it

# Keys that change the computation in a way these architectures do not have; 0 or absent is fine.
_UNSUPPORTED = (
    "expert_count",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "nextn_predict_layers",
)


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config of the model in `file`, sizes checked only against absolute limits."""
    metadata = Fields(file.metadata, str(file.path))
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.error("general.architecture", architecture, f"one of {', '.join(ARCHITECTURES)}")
    if (parts := metadata.integer("split.count", 1, low=0)) > 1:
        raise metadata.error("split.count", parts, "1 (join the parts with gguf-split --merge)")
    model_type, class_name = ARCHITECTURES[architecture]
    prefix = f"{architecture}."
    own = {key: _uniform(value) for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields(own, str(file.path), prefix)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    context = keys.integer("context_length", high=MAX_CONTEXT)
    family = FAMILIES.get(architecture)
    own_keys = () if family is None else family.own_keys
    _refuse_unsupported(keys, head_dim, None if architecture == "gemma3" else context, own_keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExecutorError(f"{file.path}: tensor 'token_embd.weight': a matrix of that name is expected")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(keys.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": model_type == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "gelu_pytorch_tanh" if architecture == "gemma3" else "silu",
        "torch_dtype": _dtype(file),
        **_token_ids(metadata, embedding.shape[0]),
    }
    if "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    if architecture == "gemma3":
        config |= _gemma3(keys, config)
    if family is not None:
        config |= family_config(architecture, keys, file, head_dim)
    return config


def _uniform(value: Any) -> Any:
    """The one number of a list that has it for every layer."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _token_ids(metadata: Fields, vocab_size: int) -> dict[str, Any]:
    """bos_token_id, and eos_token_id with every id that ends a turn or a message."""

    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return metadata.integer(key, low=0, high=vocab_size - 1) if key in metadata else None

    ends = [i for i in dict.fromkeys(token(name) for name in ("eos", "eot", "eom")) if i is not None]
    return {"bos_token_id": token("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _rope_scaling(keys: Fields) -> dict[str, Any] | None:
    keys.only("rope.scaling.type", None, "none", "linear", "yarn")
    if "rope.scaling.type" not in keys and "rope.scale_linear" in keys:
        return {"rope_type": "linear", "factor": _shortest(keys.number("rope.scale_linear"))}
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", high=MAX_CONTEXT)
        scaling["original_max_position_embeddings"] = original
    return scaling


def _refuse_unsupported(keys: Fields, head_dim: int, context: int | None, known: tuple[str, ...]) -> None:
    """`context`: what a window must be no shorter than; None: any window will do. `known`: what is read elsewhere."""
    for key in set(_UNSUPPORTED).difference(known):
        keys.only(key, None, 0)
    for key in {"attention.value_length", "rope.dimension_count"}.difference(known):
        keys.only(key, head_dim, default=head_dim)
    window = keys.integer("attention.sliding_window", 0, low=0)
    if context is not None and 0 < window < context and "attention.sliding_window" not in known:
        raise keys.error("attention.sliding_window", window, f"at least the context {context}")


def _gemma3(keys: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What the other architectures do not have. Every sixth layer attends to everything, the others to a window."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = keys.integer("attention.sliding_window_pattern", 6, high=MAX_LAYERS)
    # The 27B model alone (62 layers) scales by hidden/heads; the file does not say so.
    scalar = config["hidden_size"] // config["num_attention_heads"] if num_layers == 62 else head_dim
    return {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": _shortest(keys.number("rope.freq_base_swa", 10000.0)),
        "sliding_window": keys.integer("attention.sliding_window", high=MAX_CONTEXT),
        "sliding_window_pattern": pattern,
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)],
        "final_logit_softcapping": keys.number_or_zero("final_logit_softcapping") or None,
    }


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's RoPE scaling, which GGUF stores only as its effect: one divisor per frequency.

    The largest divisor is the factor; the other parameters have had one value in every release. The divisors
    they give must be those of the file, or the file holds a scaling that the config cannot express.
    """
    entry, head_dim = file.tensors["rope_freqs.weight"], config["head_dim"]
    if entry.type.name != "F32" or entry.shape != (head_dim // 2,):
        found = f"{entry.type.name} {entry.shape}"
        raise ExecutorError(f"{file.path}: tensor 'rope_freqs.weight' is {found}; expected F32 {(head_dim // 2,)}")
    stored = np.frombuffer(file.data, np.dtype("<f4"), head_dim // 2, entry.offset)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if not (math.isfinite(factor) and factor > 0 and np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), 1e-3)):
        raise ExecutorError(
            f"{file.path}: tensor 'rope_freqs.weight' is not Llama 3's scaling with factor {factor:g}; "
            f"expected low_freq_factor {low:g}, high_freq_factor {high:g}, {original} original positions"
        )
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _dtype(file: GgufFile) -> str:
    """The dtype that most values have; bfloat16, which all these models were trained in, when they are quantized."""
    names = {"F32": "float32", "F16": "float16"}
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        name = names.get(entry.type.name, "bfloat16")
        sizes[name] = sizes.get(name, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda name: sizes[name])


def _shortest(value: float) -> float:
    """The shortest decimal for the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
