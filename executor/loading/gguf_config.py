"""Converts a GGUF file's metadata to the config.json of the same model on the hub, and lists families' tensor names.

RoPE settings use the older fields (`rope_theta`, `rope_scaling`), which all readers of config.json support.
Metadata that changes the computation and cannot be expressed is refused, never ignored.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from penstock.executor.gguf_header import GgufFile
from penstock.executor.loading.fields import Fields
from penstock.executor.protocol import ExecutorError

SIGMOID = 2  # expert_gating_func; 1 is the softmax
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 24  # it is the length of tables

# Keys whose features are not supported for these architectures; they must be 0 or absent.
_UNSUPPORTED = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "nextn_predict_layers",
)


class GgufFamily(NamedTuple):
    """A GGUF architecture. `renamed` maps HF names of a layer's tensors that differ from Llama's to names in the file;
    "" means that there is no such tensor. Tensors that Llama lacks are norms or several joined projections."""

    model_type: str
    class_name: str
    renamed: Mapping[str, str] = MappingProxyType({})
    own_keys: tuple[str, ...] = ()  # metadata keys that are supported only for this architecture
    is_permuted: bool = False  # the rows of queries and keys are permuted, as in Llama
    has_output_bias: bool = True  # o_proj has a bias if q, k and v have one
    plus_one: bool = False  # norms are stored with one added
    has_windows: bool = False  # some layers have a window, by the architecture's fixed pattern


_GATE_UP = {"mlp.gate_proj.weight": "", "mlp.up_proj.weight": "", "mlp.gate_up_proj.weight": "ffn_up.weight"}
_QKV = {f"self_attn.{part}_proj.weight": "" for part in "qkv"} | {"self_attn.qkv_proj.weight": "attn_qkv.weight"}
_AFTER = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_AFTER_GLM = {
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
}
_HEAD_NORMS = {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
_HUNYUAN = {
    "self_attn.query_layernorm.weight": "attn_q_norm.weight",
    "self_attn.key_layernorm.weight": "attn_k_norm.weight",
}
_GEMMA = _AFTER | {"pre_feedforward_layernorm.weight": "ffn_norm.weight"}
_GPT_OSS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
}
_SCALES = "logit_scale", "embedding_scale", "residual_scale"

FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", has_output_bias=False),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _HEAD_NORMS),
    "gemma2": GgufFamily(
        "gemma2", "Gemma2ForCausalLM", _GEMMA, ("attn_logit_softcapping",), plus_one=True, has_windows=True
    ),
    "gemma3": GgufFamily("gemma3_text", "Gemma3ForCausalLM", _GEMMA | _HEAD_NORMS, plus_one=True, has_windows=True),
    "ernie4_5": GgufFamily("ernie4_5", "Ernie4_5ForCausalLM"),
    "glm4": GgufFamily(
        "glm4", "Glm4ForCausalLM", _GATE_UP | _AFTER_GLM, ("rope.dimension_count",), has_output_bias=False
    ),
    "granite": GgufFamily("granite", "GraniteForCausalLM", {}, _SCALES, is_permuted=True),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", {"input_layernorm.weight": ""} | _AFTER | _HEAD_NORMS),
    "phi3": GgufFamily(
        "phi3", "Phi3ForCausalLM", _QKV | _GATE_UP, ("rope.dimension_count", "attention.sliding_window")
    ),
    "seed_oss": GgufFamily(
        "seed_oss",
        "SeedOssForCausalLM",
        {"post_attention_layernorm.weight": "post_attention_norm.weight"},
        has_output_bias=False,
    ),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", is_permuted=True),
    "qwen2moe": GgufFamily("qwen2_moe", "Qwen2MoeForCausalLM", has_output_bias=False),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _HEAD_NORMS),
    "deepseek2": GgufFamily("deepseek_v2", "DeepseekV2ForCausalLM"),
    "gpt-oss": GgufFamily("gpt_oss", "GptOssForCausalLM", _GPT_OSS, has_windows=True),
}
# Files of these models name another architecture: Llama (with experts) and DeepSeek V2 (with another expert choice).
MIXTRAL = GgufFamily("mixtral", "MixtralForCausalLM", is_permuted=True)
DEEPSEEK_V3 = GgufFamily("deepseek_v3", "DeepseekV3ForCausalLM")
BY_TYPE = {family.model_type: family for family in (*FAMILIES.values(), MIXTRAL, DEEPSEEK_V3)}
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the config of the model in `file`; its sizes are checked only against absolute limits."""
    metadata = Fields(file.metadata, str(file.path))
    architecture = metadata.text("general.architecture")
    if architecture not in FAMILIES:
        raise metadata.error("general.architecture", architecture, f"one of {', '.join(FAMILIES)}")
    if (parts := metadata.integer("split.count", 1, low=0)) > 1:
        raise metadata.error("split.count", parts, "1 (join the parts with gguf-split --merge)")
    prefix = f"{architecture}."
    own = {key: _uniform(value) for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields(own, str(file.path), prefix)
    family = _family(architecture, keys)
    model_type = family.model_type
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    is_latent = architecture == "deepseek2"
    head_dim = keys.integer("rope.dimension_count" if is_latent else "attention.key_length", hidden_size // num_heads)
    context = keys.integer("context_length", high=MAX_CONTEXT)
    _refuse_unsupported(keys, None if is_latent else head_dim, None if family.has_windows else context, family.own_keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExecutorError(f"{file.path}: tensor 'token_embd.weight': a matrix of that name is expected")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
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
    return config | family_config(architecture, keys, file, head_dim)


def layer_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]] | None]:
    """Return the differences from a Llama layer: HF name → name and shape in the file; None: there is no tensor."""
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_up.weight": (2 * inner, hidden),
        "attn_qkv.weight": ((heads + 2 * kv_heads) * dim, hidden),
        "attn_q_norm.weight": (heads * dim,) if config["model_type"] == "olmo2" else (dim,),
        "attn_sinks.weight": (heads,),
        "attn_k_norm.weight": (kv_heads * dim,) if config["model_type"] == "olmo2" else (dim,),
    }
    family = BY_TYPE[config["model_type"]]
    found = {ours: (name, shapes.get(name, (hidden,))) if name else None for ours, name in family.renamed.items()}
    return found if family.has_output_bias else {**found, "self_attn.o_proj.bias": None}


def family_config(architecture: str, keys: Fields, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the settings of an architecture's config that Llama's does not have."""
    if architecture == "granite":
        return {
            "attention_multiplier": keys.number("attention.scale", head_dim**-0.5),
            "embedding_multiplier": keys.number("embedding_scale", 1.0),
            "residual_multiplier": keys.number("residual_scale", 1.0),
            "logits_scaling": keys.number("logit_scale"),
        }
    if architecture in ("glm4", "phi3"):
        rotated = keys.integer("rope.dimension_count", head_dim, high=head_dim)
        found: dict[str, Any] = {"partial_rotary_factor": rotated / head_dim}
        if architecture == "phi3":
            found |= {"sliding_window": keys.integer("attention.sliding_window", 0, low=0) or None}
            if FACTORS[0] in file.tensors:
                found["rope_scaling"] = _longrope(keys, file, rotated // 2)
                found["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        return found
    return {}


def _longrope(keys: Fields, file: GgufFile, count: int) -> dict[str, Any]:
    factors = []
    for name in FACTORS:
        entry = file.tensors.get(name)
        if entry is None or entry.type.name != "F32" or entry.shape != (count,):
            raise ExecutorError(f"{file.path}: tensor {name!r}: {count} numbers as F32 are expected")
        factors.append(np.frombuffer(file.data, "<f4", count, entry.offset).tolist())
    return {
        "rope_type": "longrope",
        "short_factor": factors[0],
        "long_factor": factors[1],
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def _family(architecture: str, keys: Fields) -> GgufFamily:
    if architecture == "llama" and keys.integer("expert_count", 0, low=0):
        return MIXTRAL
    if architecture == "deepseek2":
        keys.only("expert_gating_func", None, 0, 1, SIGMOID)
        return DEEPSEEK_V3 if keys.integer("expert_gating_func", 0, low=0) == SIGMOID else FAMILIES[architecture]
    if not architecture.endswith(("moe", "oss")):
        keys.only("expert_count", None, 0)
    return FAMILIES[architecture]


def _experts(keys: Fields, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the expert settings of Mixtral, gpt-oss and Qwen. The family determines norm_topk_prob, not the file."""
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
    """Return DeepSeek's settings. Files from before llama.cpp's MLA have head sizes in the keys without `_mla`."""
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
    """Return the common value of a per-layer list if all layers have the same, else the value unchanged."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _token_ids(metadata: Fields, vocab_size: int) -> dict[str, Any]:
    """Return bos_token_id, and eos_token_id with all ids that end the text, a turn or a message."""

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
        if growth := keys.number_or_zero("rope.scaling.yarn_log_multiplier"):  # DeepSeek's mscale, stored divided by 10
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(10 * growth))
    return scaling


def _refuse_unsupported(keys: Fields, head_dim: int | None, context: int | None, known: tuple[str, ...]) -> None:
    """Raise ExecutorError for unsupported settings. All head sizes must be `head_dim`, if given; a window must be at
    least `context`, if given. The keys in `known` are read elsewhere."""
    for key in set(_UNSUPPORTED).difference(known):
        keys.only(key, None, 0)
    for key in {"attention.value_length", "rope.dimension_count"}.difference(known) if head_dim else ():
        keys.only(key, head_dim, default=head_dim)
    window = keys.integer("attention.sliding_window", 0, low=0)
    if context is not None and 0 < window < context and "attention.sliding_window" not in known:
        raise keys.error("attention.sliding_window", window, f"at least the context {context}")


def _gemma(keys: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings specific to Gemma 2 and 3. Every second or sixth layer has full attention."""
    is_second, head_dim = config["model_type"] == "gemma2", config["head_dim"]
    # Only the 27B models scale by hidden/heads; the file does not contain this.
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
    """Return the window settings: every `every`-th layer has full attention, the others a sliding window."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "sliding_window": keys.integer("attention.sliding_window", high=MAX_CONTEXT),
        "layer_types": ["sliding_attention" if index % every else "full_attention" for index in layers],
    }


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3.1's RoPE scaling, which GGUF stores only as one divisor per frequency.

    The largest divisor is the factor; the other parameters have been the same in every release. If they do not yield
    the divisors in the file, the file has a scaling that the config cannot express: raise ExecutorError.
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
    """Return the dtype of most values; quantized ones count as bfloat16, in which all these models were trained."""
    names = {"F32": "float32", "F16": "float16"}
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        name = names.get(entry.type.name, "bfloat16")
        sizes[name] = sizes.get(name, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda name: sizes[name])


def _shortest(value: float) -> float:
    """Return the number with the shortest decimal form for the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
