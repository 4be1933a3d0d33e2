"""Converts a config.json to a `DecoderSpec`, for models with a mixture of experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.executor.loading.arrangement import ARRANGEMENTS, Arrangement, stacked_experts
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import (
    attention_biases,
    ernie4_5,
    full_layers,
    llama,
    max_positions_of,
    mistral,
    multiplied,
    pick_layers,
    qwen2,
    qwen3,
    spec_of,
    uniform_layers,
)
from penstock.executor.models.rope import kind_of, read_rope, rope_section, yarn_growth
from penstock.executor.models.spec import DecoderSpec, LatentSpec, LayerSpec
from penstock.executor.moe_spec import MoeSpec

_MIXTRAL_NAMES: dict[str, Any] = {"block": "block_sparse_moe", "projections": ("w1", "w3", "w2")}


def mixtral(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None)
    spec = mistral(own)
    return replace(spec, layers=_sparse(own, spec.layers, _local_experts(fields, **_MIXTRAL_NAMES)))


def _local_experts(fields: Fields, **features: Any) -> MoeSpec:
    """Return experts as large as the config's MLP; `features` are further fields of the spec."""
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        **features,
    )


def qwen2_moe(fields: Fields) -> DecoderSpec:
    moe = shared_expert(fields, qwen_moe(fields))
    return replace(qwen_sparse(fields, qwen2(fields), moe), qkv_bias=fields.flag("qkv_bias", True))


def qwen3_moe(fields: Fields) -> DecoderSpec:
    return qwen_sparse(fields, qwen3(fields), qwen_moe(fields))


def deepseek_v2(fields: Fields) -> DecoderSpec:
    fields.fixed(scoring_func="softmax", norm_topk_prob=False)
    fields.only("topk_method", "greedy", "group_limited_greedy", default="greedy")
    is_grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
    return _deepseek(fields, _deepseek_moe(fields, is_grouped))


def deepseek_v3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1)
    return _deepseek(own, deepseek_v3_moe(own))


def glm4_moe(fields: Fields) -> DecoderSpec:
    """Read GLM-4.5: DeepSeek-V3's experts with grouped-query attention."""
    own = fields.with_defaults(
        rms_norm_eps=1e-5, max_position_embeddings=131072, first_k_dense_replace=1, n_shared_experts=1
    )
    layers = first_dense(own, uniform_layers(own, partial=0.5), deepseek_v3_moe(own))
    biases: dict[str, Any] = {"qkv_bias": own.flag("attention_bias", False), "qk_norm": own.flag("use_qk_norm", False)}
    return spec_of(own, layers, **biases)


def glm4_moe_lite(fields: Fields) -> DecoderSpec:
    """Read GLM-4.7 Flash: DeepSeek-V3 with other defaults for absent fields."""
    own = fields.with_defaults(
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
    )
    spec = deepseek_v3(own)
    are_dense = full_layers(own, "sparse", [layer.moe is None for layer in spec.layers], "mlp_layer_types", "dense")
    moe = deepseek_v3_moe(own)
    layers = (replace(layer, moe=None if dense else moe) for layer, dense in zip(spec.layers, are_dense, strict=True))
    return replace(spec, layers=tuple(layers))


def minimax_m2(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rope_theta=5e6, head_dim=128, max_position_embeddings=196608)
    own.fixed(scoring_func="sigmoid", qk_norm_type="per_layer", shared_intermediate_size=0)
    own.fixed(use_qk_norm=True, use_routing_bias=True)
    share = own.integer("rotary_dim", own.integer("head_dim")) / own.integer("head_dim")
    moe = _local_experts(own, scoring="sigmoid", has_bias=True, **_MIXTRAL_NAMES)
    layers = _sparse(own, uniform_layers(own, partial=share), moe)
    names = ((".block_sparse_moe.e_score_", ".block_sparse_moe.gate.e_score_"),)
    return spec_of(own, layers, is_qk_norm_wide=True, arrangement=Arrangement(names))


def ernie4_5_moe(fields: Fields) -> DecoderSpec:
    heads = fields.integer("num_attention_heads")
    own = fields.with_defaults(head_dim=fields.integer("hidden_size") // heads, moe_num_shared_experts=2)
    own.fixed(use_bias=False)
    if (least := own.number("moe_norm_min", 1e-12)) > 1e-6:  # minimum of the sum that normalizes the weights
        raise own.error("moe_norm_min", least, "at most 1e-6")
    size = own.integer("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=own.integer("moe_num_experts"),
        top_k=own.integer("moe_k"),
        intermediate_size=size,
        renormalize=True,
        has_bias=True,
        shared_size=size * own.integer("moe_num_shared_experts", low=0),
    )
    spec = ernie4_5(own)
    last, every = len(spec.layers) - 1, own.integer("moe_layer_interval", 1)
    first, end = own.integer("moe_layer_start_index", 1, low=0), own.integer("moe_layer_end_index", -1, low=-1)
    chosen = [index for index in range(first, (last if end == -1 else end) + 1) if (index + 1) % every == 0]
    layers = _sparse(own, spec.layers, moe, lambda index: index in chosen)
    bias = "moe_statics.e_score_correction_bias"
    arrangement = replace(
        spec.arrangement,
        renames=((f".mlp.{bias}", ".mlp.gate.e_score_correction_bias"),),
        single=(bias,),
        ignored=("model.mtp_",),
    )
    return replace(spec, layers=layers, arrangement=arrangement)


def gpt_oss(fields: Fields) -> DecoderSpec:
    """Read gpt-oss: every other layer has a window, each head has a sink, and experts are stored as MXFP4."""
    fields.fixed(swiglu_alpha=1.702, swiglu_limit=7.0)
    fields = fields.with_defaults(rms_norm_eps=1e-5, rope_theta=1.5e5)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_scaling", None, "an object (these models have YaRN)")
    moe = _local_experts(fields, router="router", has_router_bias=True)
    layers, window = _sparse(fields, uniform_layers(fields), moe), fields.integer("sliding_window", 128)
    are_full = [index % 2 == 1 for index in range(len(layers))]
    layers = pick_layers(fields, layers, are_full, window=window)
    biases = attention_biases(fields, default=True) | {"mlp_bias": True}
    spec = spec_of(fields, layers, has_sinks=True, arrangement=ARRANGEMENTS["gpt_oss"], **biases)
    return replace(spec, activation="clamped_swish")


def granite_moe_shared(fields: Fields) -> DecoderSpec:
    return granite_moe(fields, fields.integer("shared_intermediate_size", 0, low=0))


def granite_moe(fields: Fields, shared: int = 0) -> DecoderSpec:
    """Read Granite; `shared` is the size of the shared MLP, with experts or, in Granite 4, also without any."""
    size = fields.integer("intermediate_size")
    num_experts = fields.integer("num_local_experts", 8, low=0)
    spec = multiplied(fields, llama(fields.with_defaults(mlp_bias=False)))
    names = ((".router.layer.", ".gate."),)
    experts = stacked_experts("input_linear.weight", "output_linear.weight", "block_sparse_moe.")
    where = "block_sparse_moe.shared_experts" if num_experts else "mlp"
    always = "shared_mlp.input_linear", ((f"{where}.gate_proj", 1), (f"{where}.up_proj", 1))
    after = "shared_mlp.output_linear", ((f"{where}.down_proj", 1),)
    arrangement = Arrangement(names, (*experts, always, after))
    if not num_experts:
        return replace(spec, intermediate_size=shared, arrangement=arrangement)
    top_k = fields.integer("num_experts_per_tok", 2)  # 0 in models without experts
    moe = MoeSpec(num_experts, top_k, size, renormalize=True, shared_size=shared, block="block_sparse_moe")
    return replace(spec, layers=_sparse(fields, spec.layers, moe), arrangement=arrangement)


def deepseek_v3_moe(fields: Fields) -> MoeSpec:
    fields.fixed(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    moe = _deepseek_moe(fields, is_grouped=True)
    if moe.num_groups > 1 and moe.num_experts < 2 * moe.num_groups:  # the best two experts of a group rate it
        raise fields.error("n_group", moe.num_groups, f"at most half of n_routed_experts ({moe.num_experts})")
    renormalize = fields.flag("norm_topk_prob", True)
    return replace(moe, scoring="sigmoid", has_bias=True, renormalize=renormalize, renormalize_eps=1e-20)


def _deepseek(fields: Fields, moe: MoeSpec) -> DecoderSpec:
    fields.fixed(moe_layer_freq=1)
    latent = LatentSpec(
        kv_rank=fields.integer("kv_lora_rank"),
        q_rank=fields.integer_or_none("q_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise fields.error("qk_rope_head_dim", latent.rope_dim, "an even number")
    rope = read_rope(fields, latent.rope_dim, max_positions_of(fields))
    layers = first_dense(fields, (LayerSpec(rope),) * fields.integer("num_hidden_layers"), moe)
    biases = attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias", False)}
    spec = spec_of(fields, layers, attention_scale=_latent_scale(fields, latent), **biases)
    return replace(spec, latent=latent, num_kv_heads=1, head_dim=latent.rope_dim + latent.kv_rank)


def first_dense(fields: Fields, layers: tuple[LayerSpec, ...], moe: MoeSpec) -> tuple[LayerSpec, ...]:
    first = fields.integer("first_k_dense_replace", 0, low=0)
    return _sparse(fields, layers, moe, lambda index: index >= first)


def _latent_scale(fields: Fields, latent: LatentSpec) -> float:
    """Return the attention scale; with YaRN it grows with the factor as `mscale_all_dim` determines."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    section = rope_section(fields)
    grows = section.number_or_zero("mscale_all_dim")
    if kind_of(section) == "default" or not grows:
        return scale
    return scale * yarn_growth(section.number("factor"), grows) ** 2


def _deepseek_moe(fields: Fields, is_grouped: bool) -> MoeSpec:
    num_experts = _count(fields, "n_routed_experts")
    num_groups = (fields.integer_or_none("n_group") or 1) if is_grouped else 1
    top_groups = (fields.integer_or_none("topk_group") or 1) if is_grouped else 1
    if num_experts % num_groups:
        raise fields.error("n_group", num_groups, f"a divisor of n_routed_experts ({num_experts})")
    if not 1 <= top_groups <= num_groups:
        raise fields.error("topk_group", top_groups, f"a number from 1 to n_group ({num_groups})")
    top_k, within = fields.integer("num_experts_per_tok"), num_experts // num_groups * top_groups
    if top_k > within:
        raise fields.error("num_experts_per_tok", top_k, f"at most the experts of topk_group groups ({within})")
    size = fields.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=size,
        renormalize=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        shared_size=size * fields.integer("n_shared_experts", 0, low=0),
    )


def shared_expert(fields: Fields, moe: MoeSpec) -> MoeSpec:
    size = fields.integer("shared_expert_intermediate_size")
    return replace(moe, shared_size=size, shared_name="shared_expert", has_shared_gate=True)


def qwen_moe(fields: Fields, renormalize: bool = False) -> MoeSpec:
    fields.fixed(use_sliding_window=False)  # other layers have windows than in the dense models
    return MoeSpec(
        num_experts=_count(fields, "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", renormalize),
    )


def qwen_sparse(fields: Fields, spec: DecoderSpec, moe: MoeSpec) -> DecoderSpec:
    """Add experts to every `decoder_sparse_step`-th layer, except those that `mlp_only_layers` lists."""
    dense_only = fields.integers("mlp_only_layers")
    every = fields.integer("decoder_sparse_step", 1)
    layers = _sparse(fields, spec.layers, moe, lambda at: at not in dense_only and (at + 1) % every == 0)
    return replace(spec, layers=layers)


def _sparse(
    fields: Fields, layers: tuple[LayerSpec, ...], moe: MoeSpec, is_sparse: Callable[[int], bool] = lambda _index: True
) -> tuple[LayerSpec, ...]:
    """Add experts to the layers at the indices that `is_sparse` selects."""
    if not 1 <= moe.top_k <= moe.num_experts:
        raise fields.error("num_experts_per_tok", moe.top_k, f"a number from 1 to the experts ({moe.num_experts})")
    return tuple(replace(layer, moe=moe) if is_sparse(index) else layer for index, layer in enumerate(layers))


def _count(fields: Fields, name: str) -> int:
    """Return the number of experts; transformers 5 may use the field name that all families share."""
    return fields.integer(name if name in fields else "num_local_experts")
