"""Converts a config.json to a `DecoderSpec`, for models with a mixture of experts."""

from dataclasses import replace

from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import (
    experts_of,
    full_layers,
    layers_of,
    max_positions_of,
    multiplied,
    read_family,
    spec_of,
    with_experts,
)
from penstock.executor.models.family_table import LayerPlan, ModelFamily, values_of
from penstock.executor.models.rope import kind_of, read_rope, rope_section, yarn_growth
from penstock.executor.models.spec import DecoderSpec, LatentSpec, LayerSpec
from penstock.executor.moe_spec import MoeSpec


def deepseek_v2(fields: Fields, family: ModelFamily) -> DecoderSpec:
    is_grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
    return _deepseek(fields, family, deepseek_experts(fields, family, is_grouped))


def deepseek_v3(fields: Fields, family: ModelFamily) -> DecoderSpec:
    return _deepseek(fields, family, deepseek_v3_experts(fields, family))


def glm4_moe(fields: Fields, family: ModelFamily) -> DecoderSpec:
    """Read GLM-4.5: DeepSeek-V3's experts with grouped-query attention."""
    return read_family(fields, family, moe=deepseek_v3_experts(fields, family))


def glm4_moe_lite(fields: Fields, family: ModelFamily) -> DecoderSpec:
    """Read GLM-4.7 Flash: DeepSeek-V3 with other defaults, and perhaps a list of the layers with experts."""
    spec, moe = deepseek_v3(fields, family), deepseek_v3_experts(fields, family)
    are_dense = full_layers(fields, "sparse", [layer.moe is None for layer in spec.layers], "mlp_layer_types", "dense")
    layers = (replace(layer, moe=None if dense else moe) for layer, dense in zip(spec.layers, are_dense, strict=True))
    return replace(spec, layers=tuple(layers))


def minimax_m2(fields: Fields, family: ModelFamily) -> DecoderSpec:
    share = fields.integer("rotary_dim", fields.integer("head_dim")) / fields.integer("head_dim")
    return read_family(fields, family, layers_of(fields, LayerPlan(rotated_part=share)))


def ernie4_5_moe(fields: Fields, family: ModelFamily) -> DecoderSpec:
    if (least := fields.number("moe_norm_min", 1e-12)) > 1e-6:  # minimum of the sum that normalizes the weights
        raise fields.error("moe_norm_min", least, "at most 1e-6")
    spec, last = read_family(fields, family), fields.integer("moe_layer_end_index", -1, low=-1)
    if last == -1:
        return spec
    layers = (layer if index <= last else replace(layer, moe=None) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def gpt_oss(fields: Fields, family: ModelFamily) -> DecoderSpec:
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_scaling", None, "an object (these models have YaRN)")
    return read_family(fields, family)


def granite_moe(fields: Fields, family: ModelFamily) -> DecoderSpec:
    """Read Granite, which may have a shared MLP, with experts or, in Granite 4, also without any."""
    assert family.experts is not None
    layers, where, shared = layers_of(fields, family.layers), "mlp", fields.integer("shared_intermediate_size", low=0)
    has_experts = fields.integer("num_local_experts", low=0) > 0
    if has_experts:
        moe = experts_of(fields, family.experts, shared_size=shared)
        layers, where = with_experts(fields, family.experts, layers, moe), "block_sparse_moe.shared_experts"
    always = "shared_mlp.input_linear", ((f"{where}.gate_proj", 1), (f"{where}.up_proj", 1))
    after = "shared_mlp.output_linear", ((f"{where}.down_proj", 1),)
    arrangement = replace(family.arrangement, joined=(*family.arrangement.joined, always, after))
    spec = multiplied(fields, spec_of(fields, family, layers, arrangement=arrangement))
    return spec if has_experts else replace(spec, intermediate_size=shared)


def deepseek_v3_experts(fields: Fields, family: ModelFamily) -> MoeSpec:
    moe = deepseek_experts(fields, family)
    if moe.num_groups > 1 and moe.num_experts < 2 * moe.num_groups:  # the best two experts of a group rate it
        raise fields.error("n_group", moe.num_groups, f"at most half of n_routed_experts ({moe.num_experts})")
    return moe


def deepseek_experts(fields: Fields, family: ModelFamily, is_grouped: bool = True) -> MoeSpec:
    assert family.experts is not None
    moe = experts_of(fields, family.experts)
    num_groups = (fields.integer_or_none("n_group") or 1) if is_grouped else 1
    top_groups = (fields.integer_or_none("topk_group") or 1) if is_grouped else 1
    if moe.num_experts % num_groups:
        raise fields.error("n_group", num_groups, f"a divisor of n_routed_experts ({moe.num_experts})")
    if not 1 <= top_groups <= num_groups:
        raise fields.error("topk_group", top_groups, f"a number from 1 to n_group ({num_groups})")
    if moe.top_k > (within := moe.num_experts // num_groups * top_groups):
        raise fields.error("num_experts_per_tok", moe.top_k, f"at most the experts of topk_group groups ({within})")
    return moe._replace(num_groups=num_groups, top_groups=top_groups)


def _deepseek(fields: Fields, family: ModelFamily, moe: MoeSpec) -> DecoderSpec:
    latent = LatentSpec(**values_of(fields, LatentSpec, family.latent))
    if latent.rope_dim % 2:
        raise fields.error("qk_rope_head_dim", latent.rope_dim, "an even number")
    rope = read_rope(fields, latent.rope_dim, max_positions_of(fields))
    layers, scale = (LayerSpec(rope),) * fields.integer("num_hidden_layers"), _latent_scale(fields, latent)
    spec = read_family(fields, family, layers, moe, attention_scale=scale, latent=latent)
    return replace(spec, num_kv_heads=1, head_dim=latent.rope_dim + latent.kv_rank)


def _latent_scale(fields: Fields, latent: LatentSpec) -> float:
    """Return the attention scale; with YaRN it grows with the factor as `mscale_all_dim` determines."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    section = rope_section(fields)
    grows = section.number_or_zero("mscale_all_dim")
    if kind_of(section) == "default" or not grows:
        return scale
    return scale * yarn_growth(section.number("factor"), grows) ** 2
