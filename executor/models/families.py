"""Converts a config.json to a `DecoderSpec`, by the entry of its family in families.json.

A family of dense models that the table cannot express has a function here. A field that the config omits has the
family's own default, or is refused as missing. A feature of the config that the decoder does not support is refused by
name, never ignored.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.executor.kernels import Activation
from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.family_table import ExpertPlan, LayerPlan, ModelFamily, present, values_of
from penstock.executor.models.rope import Rope, kind_of, read_rope, rope_of, rope_section
from penstock.executor.models.spec import PADDING_ROWS, DecoderSpec, LayerSpec
from penstock.executor.moe_spec import MoeSpec

Layers = tuple[LayerSpec, ...]

_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "clamped_swish": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}


def read_family(
    fields: Fields, family: ModelFamily, layers: Layers | None = None, moe: MoeSpec | None = None, **values: Any
) -> DecoderSpec:
    """Return the spec by the family's entry alone, except for the given layers, experts and values of DecoderSpec."""
    layers = layers or layers_of(fields, family.layers)
    if family.experts is not None:
        layers = with_experts(fields, family.experts, layers, moe or experts_of(fields, family.experts))
    return spec_of(fields, family, layers, **values)


def gemma(fields: Fields, family: ModelFamily) -> DecoderSpec:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    return read_family(fields, family, attention_scale=scale, embedding_scale=fields.integer("hidden_size") ** 0.5)


def phi3(fields: Fields, family: ModelFamily) -> DecoderSpec:
    section = rope_section(fields)
    if (kind := kind_of(section)) not in ("default", "longrope"):
        raise section.error("rope_type", kind, "'default' or 'longrope'")
    spec = read_family(fields, family)
    qkv = ("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads), ("v_proj", spec.num_kv_heads)
    joined = ("qkv_proj", qkv), *family.arrangement.joined
    return replace(spec, arrangement=replace(family.arrangement, joined=joined))


def smollm3(fields: Fields, family: ModelFamily) -> DecoderSpec:
    layers = layers_of(fields, family.layers)
    every = fields.integer("no_rope_layer_interval")
    rotates = fields.integers("no_rope_layers") or [(index + 1) % every for index in range(len(layers))]
    if len(rotates) < len(layers):
        raise fields.error("no_rope_layers", rotates, f"a 0 or 1 for each of {len(layers)} layers")
    mixed = [layer if turns else unrotated(layer) for layer, turns in zip(layers, rotates, strict=False)]
    window, may_slide = fields.integer_or_none("sliding_window"), fields.flag("use_sliding_window", False)
    are_full = [bool(turns) or not may_slide for turns in rotates[: len(layers)]]
    return read_family(fields, family, pick_layers(fields, mixed, are_full, window=window))


def unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, rope=Rope(0, layer.rope.theta))


def granite(fields: Fields, family: ModelFamily) -> DecoderSpec:
    return multiplied(fields, read_family(fields, family))


def multiplied(fields: Fields, spec: DecoderSpec) -> DecoderSpec:
    """Apply Granite's multipliers. Instead of multiplying each layer's update by residual_multiplier, divide the whole
    residual stream by it, which norms cancel if their eps is divided by its square."""
    residual = fields.number("residual_multiplier")
    return replace(
        spec,
        embedding_scale=fields.number("embedding_multiplier") / residual,
        norm_eps=spec.norm_eps / residual**2,
        logit_scale=1 / fields.number("logits_scaling"),
    )


def ministral3(fields: Fields, family: ModelFamily) -> DecoderSpec:
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_parameters", None, "an object")
    section = rope_section(fields)
    spec, slope = read_family(fields, family), section.number_or_zero("llama_4_scaling_beta")
    length = section.integer("original_max_position_embeddings", max_positions_of(fields))
    return replace(spec, query_growth=(slope, length) if slope and length < spec.max_positions else None)


def hunyuan_dense(fields: Fields, family: ModelFamily) -> DecoderSpec:
    section, dim = rope_section(fields), head_dim_of(fields)
    if kind_of(section) != "dynamic" or "alpha" not in section:
        return read_family(fields, family)
    # Despite its name, this rotation does not depend on the length.
    theta = section.number("rope_theta", fields.number("rope_theta", 10000.0))
    rope = Rope(dim, theta * section.number("alpha") ** (dim / max(dim - 2, 1)))
    return read_family(fields, family, (LayerSpec(rope),) * fields.integer("num_hidden_layers"))


def opt(fields: Fields, family: ModelFamily) -> DecoderSpec:
    """Read OPT: learned positions, LayerNorms before attention and MLP or after them, and an MLP with ReLU."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
    num_layers, has_norms_before = fields.integer("num_hidden_layers"), fields.flag("do_layer_norm_before", True)
    width = fields.integer("word_embed_proj_dim", hidden_size)
    return read_family(
        fields,
        family,
        (LayerSpec(Rope(0, 1.0)),) * num_layers,
        norms_stream=not has_norms_before,
        num_learned_positions=max_positions_of(fields) + PADDING_ROWS,
        embedding_size=None if width == hidden_size else width,
        arrangement=_opt_arrangement(num_layers, has_norms_before),
    )


def _opt_arrangement(num_layers: int, has_norms_before: bool) -> Arrangement:
    """Return the names of the tensors. A norm after attention is the one before the MLP, and a norm after the MLP the
    one before the next layer's attention."""
    layers = [f"decoder.layers.{index}." for index in range(num_layers)]
    if has_norms_before:
        norms = [("decoder.final_layer_norm.", "norm."), (".self_attn_layer_norm.", ".input_layernorm.")]
    else:
        norms = [(f"{layers[-1]}final_layer_norm.", "norm.")]
        norms += [(f"{a}final_layer_norm.", f"{b}input_layernorm.") for a, b in pairwise(layers)]
        norms += [(".self_attn_layer_norm.", ".post_attention_layernorm.")]
    others = ("decoder.", ""), (".final_layer_norm.", ".post_attention_layernorm."), (".out_proj.", ".o_proj.")
    return Arrangement((*norms, *others, (".fc1.", ".mlp.up_proj."), (".fc2.", ".mlp.down_proj.")))


def spec_of(fields: Fields, family: ModelFamily, layers: Layers, **values: Any) -> DecoderSpec:
    """Build a spec from the family's entry and the given values, and check the fields that all families share."""
    if layers[0].heads is None:
        fields.only("per_layer_config", None, {})
    head_dim, arrangement = head_dim_of(fields), family.arrangement
    if family.has_neighbours:
        arrangement = replace(arrangement, neighbours=(head_dim, layers[0].rope.dim))
    given = values_of(fields, DecoderSpec, family.values) | values
    names = _ACTIVATIONS[given["activation"]]
    fields.only(family.activation_field, *names, default=names[0])
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    return DecoderSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions_of(fields),
        layers=layers,
        **{"attention_scale": head_dim**-0.5, "arrangement": arrangement} | given,
    )


def experts_of(fields: Fields, plan: ExpertPlan, **values: Any) -> MoeSpec:
    """Return the experts by the family's entry, except for the given values of MoeSpec."""
    fields.check(plan.allowed)
    moe = MoeSpec(**values_of(fields, MoeSpec, plan.values) | values)
    if not plan.num_shared:
        return moe
    return moe._replace(shared_size=moe.intermediate_size * fields.integer(plan.num_shared, low=0))


def with_experts(fields: Fields, plan: ExpertPlan, layers: Layers, moe: MoeSpec) -> Layers:
    """Add experts to the layers that have them."""
    if not 1 <= moe.top_k <= moe.num_experts:
        raise fields.error("num_experts_per_tok", moe.top_k, f"a number from 1 to the experts ({moe.num_experts})")
    first = fields.integer(present(fields, plan.first), 0, low=0) if plan.first else 0
    every = fields.integer(plan.every, 1) if plan.every else 1
    dense = fields.integers(plan.dense) if plan.dense else []
    return tuple(
        replace(layer, moe=moe) if index >= first and (index + 1) % every == 0 and index not in dense else layer
        for index, layer in enumerate(layers)
    )


def head_dim_of(fields: Fields) -> int:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number")
    return head_dim


def max_positions_of(fields: Fields) -> int:
    """Return the number of positions: with YaRN `factor` times the original one, if the config has it, as in vLLM."""
    stated, section = fields.integer("max_position_embeddings"), rope_section(fields)
    if kind_of(section) != "yarn":
        return stated
    extended = section.number_or_zero("original_max_position_embeddings") * section.number("factor")
    return max(stated, min(int(extended), 2**27))  # the limit of `stated`


def layers_of(fields: Fields, plan: LayerPlan) -> Layers:
    """Return the layers by the family's entry."""
    head_dim = head_dim_of(fields)
    changes: dict[str, Any] = {}
    if plan.has_two_ropes:
        changes["rope"], rope = two_ropes(fields, head_dim, head_dim)
    else:
        rope = read_rope(fields, head_dim, max_positions_of(fields), plan.rotated_part)
    layers = (LayerSpec(rope),) * fields.integer("num_hidden_layers")
    if not plan.window or (plan.windows_if and not fields.flag(plan.windows_if, False)):
        return layers
    changes["window"] = fields.integer_or_none(plan.window)
    if plan.full_first:
        num_full = fields.integer(plan.full_first)
        return pick_layers(fields, layers, [index < num_full for index in range(len(layers))], **changes)
    every = plan.full_every
    if every is None:
        return tuple(replace(layer, **changes) for layer in layers)
    if isinstance(every, str):
        every = fields.integer(present(fields, every))
    are_full = [every > 0 and (index + 1) % every == 0 for index in range(len(layers))]
    return pick_layers(fields, layers, are_full, **changes)


def two_ropes(fields: Fields, local_dim: int, overall_dim: int) -> tuple[Rope, Rope]:
    """Return the RoPE of sliding and of full layers, for the given head sizes. transformers 5 nests the settings;
    earlier versions have a separate field for the sliding layers' theta."""
    nested = fields.section("rope_parameters") or Fields({})
    local = nested.section("sliding_attention") or Fields({})
    overall = nested.section("full_attention") or fields.section("rope_scaling") or Fields({})
    nested.no_others()
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    theta = overall.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    max_positions = max_positions_of(fields)
    return rope_of(local, local_theta, local_dim, max_positions), rope_of(overall, theta, overall_dim, max_positions)


def pick_layers(
    fields: Fields, layers: Sequence[LayerSpec], rule: list[bool], other: str = "sliding_attention", **changes: Any
) -> Layers:
    """Apply the changes to the layers without full attention, of kind `other`; `rule` is that of `full_layers`."""
    are_full = full_layers(fields, other, rule)
    return tuple(layer if full else replace(layer, **changes) for layer, full in zip(layers, are_full, strict=True))


def full_layers(
    fields: Fields, other: str, rule: list[bool], name: str = "layer_types", full: str = "full_attention"
) -> list[bool]:
    """Return whether each layer is of the kind `full`, not `other`: by the field `name` if present, else by the family's
    rule."""
    kinds = fields.texts(name)
    if kinds is None:
        return rule
    if len(kinds) != len(rule) or not set(kinds) <= {full, other}:
        raise fields.error(name, kinds, f"{len(rule)} times {full!r} or {other!r}, one per layer")
    return [kind == full for kind in kinds]
