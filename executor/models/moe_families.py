"""From a config.json to a `DecoderSpec`, for models with a mixture of experts."""

from dataclasses import replace

from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import attention_biases, max_positions_of, mistral, qwen2, qwen3, spec_of
from penstock.executor.models.rope import kind_of, read_rope, rope_section, yarn_growth
from penstock.executor.models.spec import DecoderSpec, LatentSpec, LayerSpec
from penstock.executor.moe_spec import MoeSpec


def mixtral(fields: Fields) -> DecoderSpec:
    moe = MoeSpec(
        num_experts=_count(fields, "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    spec = mistral(fields)
    return replace(spec, layers=_sparse(fields, spec.layers, moe))


def qwen2_moe(fields: Fields) -> DecoderSpec:
    moe = shared_expert(fields, qwen_moe(fields))
    return replace(qwen_sparse(fields, qwen2(fields), moe), qkv_bias=fields.flag("qkv_bias", True))


def qwen3_moe(fields: Fields) -> DecoderSpec:
    return qwen_sparse(fields, qwen3(fields), qwen_moe(fields))


def deepseek_v2(fields: Fields) -> DecoderSpec:
    fields.only("scoring_func", "softmax", default="softmax")
    fields.only("norm_topk_prob", False, default=False)
    fields.only("topk_method", "greedy", "group_limited_greedy", default="greedy")
    is_grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
    return _deepseek(fields, replace(_deepseek_moe(fields, is_grouped), renormalize=False))


def deepseek_v3(fields: Fields) -> DecoderSpec:
    fields.only("scoring_func", "sigmoid", default="sigmoid")
    fields.only("topk_method", "noaux_tc", default="noaux_tc")
    fields.only("rope_interleave", True, default=True)
    moe = replace(
        _deepseek_moe(fields, is_grouped=True),
        scoring="sigmoid",
        has_bias=True,
        renormalize=fields.flag("norm_topk_prob", True),
        renormalize_eps=1e-20,
    )
    return _deepseek(fields, moe)


def _deepseek(fields: Fields, moe: MoeSpec) -> DecoderSpec:
    fields.only("moe_layer_freq", 1, default=1)
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
    dense = (LayerSpec(rope),) * fields.integer("num_hidden_layers")
    first_sparse = fields.integer("first_k_dense_replace", 0, low=0)
    layers = tuple(layer if index < first_sparse else replace(layer, moe=moe) for index, layer in enumerate(dense))
    biases = attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias", False)}
    spec = spec_of(fields, layers, attention_scale=_latent_scale(fields, latent), **biases)
    return replace(spec, latent=latent, num_kv_heads=1, head_dim=latent.rope_dim + latent.kv_rank)


def _latent_scale(fields: Fields, latent: LatentSpec) -> float:
    """With YaRN the scores grow with the factor; `mscale_all_dim` says how much of that is meant."""
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
    return MoeSpec(
        num_experts=_count(fields, "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", renormalize),
    )


def qwen_sparse(fields: Fields, spec: DecoderSpec, moe: MoeSpec) -> DecoderSpec:
    """Sparse is every `decoder_sparse_step`-th layer, but for those that `mlp_only_layers` lists."""
    dense_only = fields.integers("mlp_only_layers")
    every = fields.integer("decoder_sparse_step", 1)
    sparse = _sparse(fields, spec.layers, moe)
    layers = (
        layer if index not in dense_only and (index + 1) % every == 0 else replace(layer, moe=None)
        for index, layer in enumerate(sparse)
    )
    return replace(spec, layers=tuple(layers))


def _sparse(fields: Fields, layers: tuple[LayerSpec, ...], moe: MoeSpec) -> tuple[LayerSpec, ...]:
    if not 1 <= moe.top_k <= moe.num_experts:
        raise fields.error("num_experts_per_tok", moe.top_k, f"a number from 1 to the experts ({moe.num_experts})")
    return tuple(replace(layer, moe=moe) for layer in layers)


def _count(fields: Fields, name: str) -> int:
    """The number of experts; transformers 5 may write it under the name that all families share."""
    return fields.integer(name if name in fields else "num_local_experts")
