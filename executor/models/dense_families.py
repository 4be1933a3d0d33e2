"""From a config.json to a `DecoderSpec`, for dense models since Phi-3, each a few settings away from Llama.

Where a family's configs leave out a field it has a value of the family's own: the defaults here are those.
"""

from dataclasses import replace
from typing import Any

from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import (
    attention_biases,
    head_dim_of,
    llama,
    max_positions_of,
    mistral,
    pick_layers,
    spec_of,
    uniform_layers,
)
from penstock.executor.models.rope import Rope, kind_of, rope_of, rope_section
from penstock.executor.models.spec import DecoderSpec, LayerSpec

GATE_UP = ("gate_up_proj", (("gate_proj", 1), ("up_proj", 1)))


def phi3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096)
    section = rope_section(own)
    if (kind := kind_of(section)) not in ("default", "longrope"):
        raise section.error("rope_type", kind, "'default' or 'longrope'")
    spec = spec_of(own, uniform_layers(own, own.integer_or_none("sliding_window")))
    qkv = ("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads), ("v_proj", spec.num_kv_heads)
    return replace(spec, arrangement=Arrangement(joined=(("qkv_proj", qkv), GATE_UP)))


def olmo2(fields: Fields) -> DecoderSpec:
    return _olmo(fields, uniform_layers(fields))


def olmo3(fields: Fields) -> DecoderSpec:
    """Three layers slide, the fourth does not; a scaled rotation is that of the layers that do not."""
    nested = fields.section("rope_parameters") or Fields({})
    local, overall = nested.section("sliding_attention"), nested.section("full_attention")
    overall = overall or fields.section("rope_scaling") or Fields({})
    thetas = (
        (local or Fields({})).number("rope_theta", 5e5),
        overall.number("rope_theta", fields.number("rope_theta", 5e5)),
    )
    sections = zip((local or Fields({}), overall), thetas, strict=True)
    ropes = [rope_of(each, theta, head_dim_of(fields), max_positions_of(fields)) for each, theta in sections]
    num_layers = fields.integer("num_hidden_layers")
    sliding = (LayerSpec(ropes[0], fields.integer("sliding_window", 4096)),) * num_layers
    slides = [(index + 1) % 4 != 0 for index in range(num_layers)]
    return _olmo(fields, pick_layers(fields, (LayerSpec(ropes[1]),) * num_layers, sliding, slides))


def _olmo(fields: Fields, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5)
    features: dict[str, Any] = {"sandwich_norms": True, "has_pre_norms": False, "is_qk_norm_wide": True}
    return spec_of(own, layers, **features, **attention_biases(own))


def smollm3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rope_theta=2e6, max_position_embeddings=32768, tie_word_embeddings=True)
    spec = llama(own)
    every = own.integer("no_rope_layer_interval", 4)
    rotates = own.integers("no_rope_layers") or [(index + 1) % every for index in range(len(spec.layers))]
    if len(rotates) < len(spec.layers):
        raise own.error("no_rope_layers", rotates, f"a 0 or 1 for each of {len(spec.layers)} layers")
    full = [layer if turns else unrotated(layer) for layer, turns in zip(spec.layers, rotates, strict=False)]
    window, may_slide = own.integer_or_none("sliding_window"), own.flag("use_sliding_window", False)
    sliding = tuple(replace(layer, window=window) for layer in full)
    slides = [may_slide and not turns for turns in rotates][: len(full)]
    return replace(spec, layers=pick_layers(own, tuple(full), sliding, slides))


def unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, rope=Rope(0, layer.rope.theta))


def granite(fields: Fields) -> DecoderSpec:
    return multiplied(fields, llama(fields))


def multiplied(fields: Fields, spec: DecoderSpec) -> DecoderSpec:
    """With Granite's multipliers. That of what a layer adds to the residual stream is taken out of it: the stream is
    so many times larger instead, which norms do not see if their eps grows along."""
    residual = fields.number("residual_multiplier", 1.0)
    return replace(
        spec,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0) / residual,
        norm_eps=spec.norm_eps / residual**2,
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        rounds_scale=False,
    )


def ministral(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(max_position_embeddings=4096 * 32)
    full, window = uniform_layers(own), own.integer_or_none("sliding_window")
    return spec_of(own, pick_layers(own, full, uniform_layers(own, window), [window is not None] * len(full)))


def ministral3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262144)
    if "rope_parameters" not in own and "rope_scaling" not in own:
        raise own.error("rope_parameters", None, "an object")
    section = rope_section(own)
    spec, slope = mistral(own), section.number_or_zero("llama_4_scaling_beta")
    length = section.integer("original_max_position_embeddings", max_positions_of(own))
    return replace(spec, query_growth=(slope, length) if slope and length < spec.max_positions else None)


def seed_oss(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(head_dim=128, attention_bias=True, max_position_embeddings=524288)
    return replace(llama(own), output_bias=own.flag("attention_out_bias", False))


def ernie4_5(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), own.flag("use_bias", False))
    return with_neighbours(spec_of(own, uniform_layers(own), **biases))


def with_neighbours(spec: DecoderSpec) -> DecoderSpec:
    """Whose rotated pairs are neighbours in the checkpoint."""
    return replace(spec, arrangement=replace(spec.arrangement, neighbours=(spec.head_dim, spec.layers[0].rope.dim)))


def glm4(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        max_position_embeddings=131072,
        attention_bias=True,
        partial_rotary_factor=0.5,
    )
    norms = (
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    )
    arrangement = Arrangement(norms, (GATE_UP,))
    biased = own.flag("attention_bias", True)
    return with_neighbours(
        spec_of(own, uniform_layers(own), sandwich_norms=True, qkv_bias=biased, arrangement=arrangement)
    )


def hunyuan_dense(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5)
    section, dim = rope_section(own), head_dim_of(own)
    if kind_of(section) == "dynamic" and "alpha" in section:  # despite its name the same for every length
        theta = section.number("rope_theta", own.number("rope_theta", 10000.0))
        rope = Rope(dim, theta * section.number("alpha") ** (dim / max(dim - 2, 1)))
        layers: tuple[LayerSpec, ...] = (LayerSpec(rope),) * own.integer("num_hidden_layers")
    else:
        layers = uniform_layers(own)
    names = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
    return spec_of(
        own, layers, qk_norm=True, rotates_first=True, arrangement=Arrangement(names), **attention_biases(own)
    )
