"""GGUF architectures that are a few names and keys away from Llama: what their files have, as the hub has it."""

from typing import Any, NamedTuple

import numpy as np

from penstock.executor.loading.fields import Fields
from penstock.executor.loading.gguf_file import GgufFile
from penstock.executor.protocol import ExecutorError


class GgufFamily(NamedTuple):
    """`renamed`: names of a layer's tensors that are not Llama's, and which of the file's they are; "" where there is
    none. A name that is the hub's alone is a norm, or several projections on top of each other."""

    model_type: str
    class_name: str
    renamed: dict[str, str]
    own_keys: tuple[str, ...] = ()  # that other architectures do not have
    is_permuted: bool = False  # rows of queries and keys, as in Llama
    has_output_bias: bool = True  # where the others have biases


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
_WIDE = {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
_HUNYUAN = {
    "self_attn.query_layernorm.weight": "attn_q_norm.weight",
    "self_attn.key_layernorm.weight": "attn_k_norm.weight",
}
_SCALES = "logit_scale", "embedding_scale", "residual_scale"

FAMILIES = {
    "ernie4_5": GgufFamily("ernie4_5", "Ernie4_5ForCausalLM", {}),
    "glm4": GgufFamily(
        "glm4", "Glm4ForCausalLM", _GATE_UP | _AFTER_GLM, ("rope.dimension_count",), has_output_bias=False
    ),
    "granite": GgufFamily("granite", "GraniteForCausalLM", {}, _SCALES, is_permuted=True),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", {"input_layernorm.weight": ""} | _AFTER | _WIDE),
    "phi3": GgufFamily(
        "phi3", "Phi3ForCausalLM", _QKV | _GATE_UP, ("rope.dimension_count", "attention.sliding_window")
    ),
    "seed_oss": GgufFamily(
        "seed_oss",
        "SeedOssForCausalLM",
        {"post_attention_layernorm.weight": "post_attention_norm.weight"},
        has_output_bias=False,
    ),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", {}, is_permuted=True),
}
BY_TYPE = {family.model_type: family for family in FAMILIES.values()}
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def layer_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]] | None]:
    """Of a family's layer, beside Llama's: name on the hub → name and shape in the file; None: there is no such."""
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_up.weight": (2 * inner, hidden),
        "attn_qkv.weight": ((heads + 2 * kv_heads) * dim, hidden),
        "attn_q_norm.weight": (heads * dim,) if config["model_type"] == "olmo2" else (dim,),
        "attn_k_norm.weight": (kv_heads * dim,) if config["model_type"] == "olmo2" else (dim,),
    }
    family = BY_TYPE[config["model_type"]]
    found = {ours: (name, shapes.get(name, (hidden,))) if name else None for ours, name in family.renamed.items()}
    return found if family.has_output_bias else {**found, "self_attn.o_proj.bias": None}


def family_config(architecture: str, keys: Fields, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """What a config says beside that of a Llama."""
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
