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
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    **{name: (family.model_type, family.class_name) for name, family in FAMILIES.items()},
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
_WINDOWED = ("gemma2", "gemma3", "gpt-oss")  # in some layers, as the architecture says
# Stored under one name with others: with experts, and with another choice of them.
MIXTRAL = "mixtral", "MixtralForCausalLM"
DEEPSEEK_V3 = "deepseek_v3", "DeepseekV3ForCausalLM"
SIGMOID = 2  # expert_gating_func; 1 is the softmax
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 24  # tables of this length are built from it

# Keys that change the computation in a way these architectures do not have; 0 or absent is fine.
_UNSUPPORTED = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "nextn_predict_layers",
)
_GEMMA2_KEYS = ("attn_logit_softcapping",)


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config of the model in `file`, sizes checked only against absolute limits."""
    metadata = Fields(file.metadata, str(file.path))
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.error("general.architecture", architecture, f"one of {', '.join(ARCHITECTURES)}")
    if (parts := metadata.integer("split.count", 1, low=0)) > 1:
        raise metadata.error("split.count", parts, "1 (join the parts with gguf-split --merge)")
    prefix = f"{architecture}."
    own = {key: _uniform(value) for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields(own, str(file.path), prefix)
    model_type, class_name = _kind(architecture, keys)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    is_latent = architecture == "deepseek2"
    head_dim = keys.integer("rope.dimension_count" if is_latent else "attention.key_length", hidden_size // num_heads)
    context = keys.integer("context_length", high=MAX_CONTEXT)
    family = FAMILIES.get(architecture)
    own_keys = _GEMMA2_KEYS if architecture == "gemma2" else () if family is None else family.own_keys
    context_of_all = None if architecture in _WINDOWED else context
    _refuse_unsupported(keys, None if is_latent else head_dim, context_of_all, own_keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExecutorError(f"{file.path}: tensor 'token_embd.weight': a matrix of that name is expected")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer(
            "expert_feed_forward_length" if architecture == "gpt-oss" else "feed_forward_length"
        ),
        "num_hidden_layers": keys.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if is_latent else keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(keys.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": model_type in ("qwen2", "qwen2_moe") or "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "gelu_pytorch_tanh" if architecture in ("gemma2", "gemma3") else "silu",
        "torch_dtype": _dtype(file),
        **_token_ids(metadata, embedding.shape[0]),
    }
    if "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    if architecture in ("gemma2", "gemma3"):
        config |= _gemma(keys, config)
    if architecture == "gpt-oss":
        config |= _windows(keys, config, every=2)
        if config["rope_scaling"] is not None:
            config["rope_scaling"]["truncate"] = False
    if is_latent:
        config |= _deepseek(keys, model_type)
    elif "expert_count" in keys:
        config |= _experts(keys, model_type, config)
    if family is not None:
        config |= family_config(architecture, keys, file, head_dim)
    return config


def _kind(architecture: str, keys: Fields) -> tuple[str, str]:
    if architecture == "llama" and keys.integer("expert_count", 0, low=0):
        return MIXTRAL
    if architecture == "deepseek2":
        keys.only("expert_gating_func", None, 0, 1, SIGMOID)
        return DEEPSEEK_V3 if keys.integer("expert_gating_func", 0, low=0) == SIGMOID else ARCHITECTURES[architecture]
    if not architecture.endswith(("moe", "oss")):
        keys.only("expert_count", None, 0)
    return ARCHITECTURES[architecture]


def _experts(keys: Fields, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Of Mixtral, gpt-oss and Qwen. Files do not say whether shares are made to sum to one; each architecture has its way."""
    top_k, inner = keys.integer("expert_used_count"), config["intermediate_size"]
    experts = {"num_experts_per_tok": top_k, "num_local_experts": keys.integer("expert_count", high=MAX_EXPERTS)}
    if kind in ("mixtral", "gpt_oss"):
        return experts
    experts["num_experts"] = experts.pop("num_local_experts")
    experts["moe_intermediate_size"] = keys.integer("expert_feed_forward_length", inner // top_k)
    if kind == "qwen2_moe":
        experts["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length", inner)
    return experts | {"norm_topk_prob": kind == "qwen3_moe"}


def _deepseek(keys: Fields, kind: str) -> dict[str, Any]:
    """Files of before latents were attended to have the length of a head where later ones have a latent's."""
    rope_dim, is_old = keys.integer("rope.dimension_count"), "attention.key_length_mla" not in keys
    key_length, value_length = (
        keys.integer(f"attention.{part}_length{'' if is_old else '_mla'}") for part in ("key", "value")
    )
    if key_length <= rope_dim:
        raise keys.error("attention.key_length", key_length, f"more than rope.dimension_count ({rope_dim})")
    config: dict[str, Any] = {
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer_or_none("attention.q_lora_rank"),
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_length,
        "n_routed_experts": keys.integer("expert_count", high=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": _shortest(keys.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }
    if kind == "deepseek_v2":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
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
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in keys:
                scaling[name] = _shortest(keys.number(key))
        if growth := keys.number_or_zero("rope.scaling.yarn_log_multiplier"):  # DeepSeek's, a tenth of it
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(10 * growth))
    return scaling


def _refuse_unsupported(keys: Fields, head_dim: int | None, context: int | None, known: tuple[str, ...]) -> None:
    """`head_dim`: what all of a head's lengths must be; None: they may differ. `context`: what a window must be no
    shorter than; None: any window will do. `known`: what is read elsewhere."""
    for key in set(_UNSUPPORTED).difference(known):
        keys.only(key, None, 0)
    for key in {"attention.value_length", "rope.dimension_count"}.difference(known) if head_dim else ():
        keys.only(key, head_dim, default=head_dim)
    window = keys.integer("attention.sliding_window", 0, low=0)
    if context is not None and 0 < window < context and "attention.sliding_window" not in known:
        raise keys.error("attention.sliding_window", window, f"at least the context {context}")


def _gemma(keys: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What the other architectures do not have. Every second or sixth layer attends to everything."""
    is_second, head_dim = config["model_type"] == "gemma2", config["head_dim"]
    # The 27B models alone scale by hidden/heads; the file does not say so.
    is_largest = config["num_hidden_layers"] == (46 if is_second else 62)
    gemma = {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim,
        "final_logit_softcapping": keys.number_or_zero("final_logit_softcapping") or None,
    }
    if is_second:
        gemma["attn_logit_softcapping"] = keys.number_or_zero("attn_logit_softcapping") or None
        return gemma | _windows(keys, config, every=2)
    pattern = keys.integer("attention.sliding_window_pattern", 6, high=MAX_LAYERS)
    gemma |= {"rope_local_base_freq": _shortest(keys.number("rope.freq_base_swa", 10000.0))}
    return gemma | {"sliding_window_pattern": pattern} | _windows(keys, config, pattern)


def _windows(keys: Fields, config: dict[str, Any], every: int) -> dict[str, Any]:
    """Every so many layers one attends to everything, the others to a window."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "sliding_window": keys.integer("attention.sliding_window", high=MAX_CONTEXT),
        "layer_types": ["sliding_attention" if index % every else "full_attention" for index in layers],
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
