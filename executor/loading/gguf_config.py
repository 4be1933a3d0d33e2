"""Converts a GGUF file's metadata to the config.json of the same model on the hub, and lists families' tensor names.

`FAMILIES` has one row per GGUF architecture: which metadata key each field of its config comes from, and which tensors
of a layer differ from Llama's. RoPE settings use the older fields (`rope_theta`, `rope_scaling`), which all readers of
config.json support. Metadata that is neither read nor known to change nothing is refused, never ignored.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from penstock.executor.gguf_header import GgufFile
from penstock.executor.loading.fields import MISSING, Fields
from penstock.executor.protocol import ExecutorError

SIGMOID = 2  # expert_gating_func; 1 is the softmax
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 24  # it is the length of tables
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
Config = dict[str, Any]

# Keys of features that are supported only where the key is read. Elsewhere these values turn them off.
_OFF = {
    (0,): "logit_scale embedding_scale residual_scale attention.clamp_kqv attention.max_alibi_bias "
    "attn_logit_softcapping nextn_predict_layers expert_count expert_used_count",
    (0, 1): "rope.scaling.factor expert_weights_scale expert_gating_func",
    (1,): "attention.causal rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor",
}
# Keys that change nothing: the tensors show the same, or no feature that is supported uses them.
_PASSED = (
    "vocab_size feed_forward_length tensor_data_layout pooling_type attention.layer_norm_epsilon "
    "rope.scaling.original_context_length rope.scaling.finetuned expert_shared_feed_forward_length "
    "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size ssm.time_step_rank"  # Granite 4 without such layers
)


class Key(NamedTuple):
    """The metadata key of a config field, without the architecture's prefix. `default` may be a function of the fields
    read before. With `is_optional`, zero or absence becomes None."""

    name: str
    default: Any = MISSING
    kind: str = "integer"  # or "number" or "flag"
    low: int = 1
    high: int | None = None
    is_optional: bool = False
    old_name: str = ""  # the key that older files have instead

    def read(self, keys: Fields, config: Config) -> Any:
        keys.pass_over(self.old_name)
        name = self.old_name if self.old_name and self.name not in keys else self.name
        if self.is_optional and not keys.has_value(name):
            return None
        default = self.default(config) if callable(self.default) else self.default
        if self.kind == "flag":
            return keys.flag(name, default)
        if self.kind == "number":
            number = keys.number(name, default)
            return _shortest(number) if name in keys else number
        return keys.integer(name, default, self.low, self.high)


_BASE = {
    "hidden_size": Key("embedding_length"),
    "intermediate_size": Key("feed_forward_length"),
    "num_hidden_layers": Key("block_count", high=MAX_LAYERS),
    "num_attention_heads": Key("attention.head_count"),
    "num_key_value_heads": Key("attention.head_count_kv", lambda it: it["num_attention_heads"]),
    "head_dim": Key("attention.key_length", lambda it: it["hidden_size"] // it["num_attention_heads"]),
    "max_position_embeddings": Key("context_length", high=MAX_CONTEXT),
    "rms_norm_eps": Key("attention.layer_norm_rms_epsilon", kind="number"),
    "rope_theta": Key("rope.freq_base", 10000.0, "number"),
}
_EXPERTS_USED = {"num_experts_per_tok": Key("expert_used_count")}
_EXPERTS = _EXPERTS_USED | {"num_local_experts": Key("expert_count", high=MAX_EXPERTS)}
_QWEN_MOE = _EXPERTS_USED | {
    "num_experts": Key("expert_count", high=MAX_EXPERTS),
    "moe_intermediate_size": Key(
        "expert_feed_forward_length", lambda it: it["intermediate_size"] // it["num_experts_per_tok"]
    ),
}
_QWEN2_MOE = _QWEN_MOE | {
    "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length", lambda it: it["intermediate_size"])
}
_DEEPSEEK = _EXPERTS_USED | {
    "head_dim": Key("rope.dimension_count"),
    "kv_lora_rank": Key("attention.kv_lora_rank"),
    "q_lora_rank": Key("attention.q_lora_rank", is_optional=True),
    "qk_head_dim": Key("attention.key_length_mla", old_name="attention.key_length"),  # files before llama.cpp's MLA
    "v_head_dim": Key("attention.value_length_mla", old_name="attention.value_length"),
    "n_routed_experts": Key("expert_count", high=MAX_EXPERTS),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "n_shared_experts": Key("expert_shared_count", 0, low=0),
    "first_k_dense_replace": Key("leading_dense_block_count", 0, low=0),
    "routed_scaling_factor": Key("expert_weights_scale", 1.0, "number"),
    "norm_topk_prob": Key("expert_weights_norm", False, "flag"),
    "n_group": Key("expert_group_count", 1),
    "topk_group": Key("expert_group_used_count", 1),
}
_GRANITE = {
    "attention_multiplier": Key("attention.scale", lambda it: it["head_dim"] ** -0.5, "number"),
    "embedding_multiplier": Key("embedding_scale", 1.0, "number"),
    "residual_multiplier": Key("residual_scale", 1.0, "number"),
    "logits_scaling": Key("logit_scale", kind="number"),
}
_WINDOW = {"sliding_window": Key("attention.sliding_window", high=MAX_CONTEXT)}
_EVERY_SECOND = _WINDOW | {"sliding_window_pattern": Key("attention.sliding_window_pattern", 2, high=MAX_LAYERS)}
_GPT_OSS = _EVERY_SECOND | _EXPERTS | {"intermediate_size": Key("expert_feed_forward_length")}
_GEMMA2 = _EVERY_SECOND | {
    "attn_logit_softcapping": Key("attn_logit_softcapping", 50.0, "number"),
    "final_logit_softcapping": Key("final_logit_softcapping", 30.0, "number"),
}
_GEMMA3 = _WINDOW | {
    "final_logit_softcapping": Key("final_logit_softcapping", kind="number", is_optional=True),
    "sliding_window_pattern": Key("attention.sliding_window_pattern", 6, high=MAX_LAYERS),
    "rope_local_base_freq": Key("rope.freq_base_swa", 10000.0, "number"),
}
_ROTATED = {"partial_rotary_factor": Key("rope.dimension_count", lambda it: it["head_dim"])}  # see _rotated
_PHI3 = _ROTATED | {"sliding_window": Key("attention.sliding_window", is_optional=True)}

_GATE_UP_NAMES = {"mlp.gate_proj.weight": "", "mlp.up_proj.weight": "", "mlp.gate_up_proj.weight": "ffn_up.weight"}
_QKV_NAMES = {f"self_attn.{part}_proj.weight": "" for part in "qkv"} | {"self_attn.qkv_proj.weight": "attn_qkv.weight"}
_AFTER_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
_AFTER_BOTH = _AFTER_ATTENTION | {"post_feedforward_layernorm.weight": "post_ffw_norm.weight"}
_AFTER_GLM = {
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
}
_HEAD_NORMS = {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
_HUNYUAN_NORMS = {f"self_attn.{part}_layernorm.weight": f"attn_{part[0]}_norm.weight" for part in ("query", "key")}
_SINKS = _AFTER_ATTENTION | {"self_attn.sinks": "attn_sinks.weight"}
_NO_OUTPUT_BIAS = {"self_attn.o_proj.bias": ""}  # only q, k and v have biases, if any
_GEMMA_NORMS = _AFTER_BOTH | {"pre_feedforward_layernorm.weight": "ffn_norm.weight"}


class GgufFamily(NamedTuple):
    """A GGUF architecture. `renamed` maps HF names of a layer's tensors that differ from Llama's to names in the file;
    "" means that there is no such tensor."""

    model_type: str
    class_name: str
    renamed: Mapping[str, str] = MappingProxyType({})
    keys: Mapping[str, Key] = MappingProxyType({})  # config fields that Llama does not have, or from another key
    constants: Mapping[str, Any] = MappingProxyType({})  # config fields that are the same for all models
    is_permuted: bool = False  # the rows of queries and keys are permuted, as in Llama
    plus_one: bool = False  # norms are stored with one added
    finish: Callable[[Fields, GgufFile, Config], Config] = lambda _keys, _file, _config: {}  # computes further fields


def _gemma(_keys: Fields, _file: GgufFile, config: Config) -> Config:
    """Return the scale of attention. Only the 27B models scale by hidden/heads; the file does not contain this."""
    is_largest = (config["model_type"], config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3_text", 62))
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


def _gpt_oss(_keys: Fields, _file: GgufFile, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return {"rope_scaling": scaling and scaling | {"truncate": False}}


def _rotated(keys: Fields, _file: GgufFile, config: Config) -> Config:
    """Return the rotated part of a head; the metadata has the number of its dimensions."""
    rotated, head_dim = config["partial_rotary_factor"], config["head_dim"]
    if rotated > head_dim:
        raise keys.error("rope.dimension_count", rotated, f"an integer from 1 to {head_dim}")
    return {"partial_rotary_factor": rotated / head_dim}


def _phi3(keys: Fields, file: GgufFile, config: Config) -> Config:
    rotated = config["partial_rotary_factor"]
    found = _rotated(keys, file, config)
    if FACTORS[0] not in file.tensors:
        return found
    short, long = (_float32(file, name, rotated // 2).tolist() for name in FACTORS)
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling["attention_factor"] = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.integer("rope.scaling.original_context_length")
    return found | {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _deepseek(keys: Fields, _file: GgufFile, config: Config) -> Config:
    key_length, rope_dim = config["qk_head_dim"], config["head_dim"]
    if key_length <= rope_dim:
        raise keys.error("attention.key_length", key_length, f"more than rope.dimension_count ({rope_dim})")
    found: Config = {"qk_nope_head_dim": key_length - rope_dim, "qk_rope_head_dim": rope_dim}
    if config["model_type"] == "deepseek_v2":
        found["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return found | {"num_key_value_heads": config["num_attention_heads"]}


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", _NO_OUTPUT_BIAS, constants={"attention_bias": True}),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _HEAD_NORMS),
    "gemma2": GgufFamily("gemma2", "Gemma2ForCausalLM", _GEMMA_NORMS, _GEMMA2, _GELU, plus_one=True, finish=_gemma),
    "gemma3": GgufFamily(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA_NORMS | _HEAD_NORMS, _GEMMA3, _GELU, plus_one=True, finish=_gemma
    ),
    "ernie4_5": GgufFamily("ernie4_5", "Ernie4_5ForCausalLM"),
    "glm4": GgufFamily(
        "glm4", "Glm4ForCausalLM", _GATE_UP_NAMES | _AFTER_GLM | _NO_OUTPUT_BIAS, _ROTATED, finish=_rotated
    ),
    "granite": GgufFamily("granite", "GraniteForCausalLM", keys=_GRANITE, is_permuted=True),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN_NORMS),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", {"input_layernorm.weight": ""} | _AFTER_BOTH | _HEAD_NORMS),
    "phi3": GgufFamily("phi3", "Phi3ForCausalLM", _QKV_NAMES | _GATE_UP_NAMES, _PHI3, finish=_phi3),
    "seed_oss": GgufFamily("seed_oss", "SeedOssForCausalLM", _AFTER_ATTENTION | _NO_OUTPUT_BIAS),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", is_permuted=True),
    "qwen2moe": GgufFamily("qwen2_moe", "Qwen2MoeForCausalLM", _NO_OUTPUT_BIAS, _QWEN2_MOE, {"attention_bias": True}),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _HEAD_NORMS, _QWEN_MOE, {"norm_topk_prob": True}),
    "deepseek2": GgufFamily("deepseek_v2", "DeepseekV2ForCausalLM", keys=_DEEPSEEK, finish=_deepseek),
    "gpt-oss": GgufFamily("gpt_oss", "GptOssForCausalLM", _SINKS, _GPT_OSS, finish=_gpt_oss),
}
# Files of these models name another architecture: Llama (with experts) and DeepSeek V2 (with another expert choice).
MIXTRAL = GgufFamily("mixtral", "MixtralForCausalLM", keys=_EXPERTS, is_permuted=True)
DEEPSEEK_V3 = GgufFamily("deepseek_v3", "DeepseekV3ForCausalLM", keys=_DEEPSEEK, finish=_deepseek)
BY_TYPE = {family.model_type: family for family in (*FAMILIES.values(), MIXTRAL, DEEPSEEK_V3)}


def config_of(file: GgufFile) -> Config:
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
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExecutorError(f"{file.path}: tensor 'token_embd.weight': a matrix of that name is expected")
    config: Config = {}
    for field, key in (_BASE | dict(family.keys)).items():
        config[field] = key.read(keys, config)
    config |= {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": _dtype(file),
        **_token_ids(metadata, embedding.shape[0]),
        **family.constants,
    }
    if "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    if every := config.get("sliding_window_pattern"):  # every so many layers, one has full attention
        layers = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = ["sliding_attention" if index % every else "full_attention" for index in layers]
    config |= family.finish(keys, file, config)
    _refuse_unread(keys, config)
    return config


def _family(architecture: str, keys: Fields) -> GgufFamily:
    if architecture == "llama" and keys.integer("expert_count", 0, low=0):
        return MIXTRAL
    if architecture == "deepseek2":
        keys.only("expert_gating_func", None, 0, 1, SIGMOID)
        return DEEPSEEK_V3 if keys.integer("expert_gating_func", 0, low=0) == SIGMOID else FAMILIES[architecture]
    return FAMILIES[architecture]


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


def _refuse_unread(keys: Fields, config: Config) -> None:
    """Raise ExecutorError for settings that were not read, unless they have the value of a Llama or change nothing."""
    for values, names in _OFF.items():
        for key in keys.unread(*names.split()):
            keys.only(key, None, *values)
    for key in keys.unread("attention.value_length", "rope.dimension_count"):
        keys.only(key, config["head_dim"], default=config["head_dim"])
    for key in keys.unread("attention.sliding_window"):
        window, context = keys.integer(key, 0, low=0), config["max_position_embeddings"]
        if 0 < window < context:
            raise keys.error(key, window, f"at least the context {context}")
    keys.pass_over(_PASSED)
    keys.no_others("no such key")


def _float32(file: GgufFile, name: str, count: int) -> Any:
    """Return a tensor of `count` numbers."""
    entry = file.tensors.get(name)
    if entry is None or entry.type.name != "F32" or entry.shape != (count,):
        raise ExecutorError(f"{file.path}: tensor {name!r}: {count} numbers as F32 are expected")
    return np.frombuffer(file.data, "<f4", count, entry.offset)


def _llama3_scaling(file: GgufFile, config: Config) -> Config:
    """Return Llama 3.1's RoPE scaling, which GGUF stores only as one divisor per frequency.

    The largest divisor is the factor; the other parameters have been the same in every release. If they do not yield
    the divisors in the file, the file has a scaling that the config cannot express: raise ExecutorError.
    """
    head_dim = config["head_dim"]
    stored = _float32(file, "rope_freqs.weight", head_dim // 2)
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
