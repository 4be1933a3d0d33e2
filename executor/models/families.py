"""Converts a config.json to a `DecoderSpec`, with one function per family of dense models.

A field that the config omits has the family's own default, or is refused as missing. A feature of the config that the
decoder does not support is refused by name, never ignored.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.executor.kernels import Activation
from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.rope import Rope, kind_of, read_rope, rope_of, rope_section
from penstock.executor.models.spec import PADDING_ROWS, DecoderSpec, LayerSpec

_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}
GATE_UP = ("gate_up_proj", (("gate_proj", 1), ("up_proj", 1)))


def llama(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(max_position_embeddings=2048)
    biases = attention_biases(own) | {"mlp_bias": own.flag("mlp_bias", False)}
    return spec_of(own, uniform_layers(own), **biases)


def mistral(fields: Fields) -> DecoderSpec:
    return spec_of(fields, uniform_layers(fields, _mistral_window(fields)))


def _mistral_window(fields: Fields) -> int | None:
    return None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)


def qwen2(fields: Fields) -> DecoderSpec:
    return spec_of(fields, _qwen_layers(fields), qkv_bias=True)


def qwen3(fields: Fields) -> DecoderSpec:
    return spec_of(fields, _qwen_layers(fields), qk_norm=True, **attention_biases(fields))


def gemma2(fields: Fields) -> DecoderSpec:
    layers, window = uniform_layers(fields), fields.integer("sliding_window", 4096)
    are_full = [index % 2 == 1 for index in range(len(layers))]
    return replace(
        _gemma(fields, pick_layers(fields, layers, are_full, window=window)),
        score_cap=None if fields.is_null("attn_logit_softcapping") else fields.number("attn_logit_softcapping", 50.0),
        logit_cap=None if fields.is_null("final_logit_softcapping") else fields.number("final_logit_softcapping", 30.0),
    )


def gemma3(fields: Fields) -> DecoderSpec:
    fields.fixed(final_logit_softcapping=None, attn_logit_softcapping=None)
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return replace(_gemma(fields, _layers_with_two_ropes(fields, pattern)), qk_norm=True)


def _gemma(fields: Fields, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    fields.fixed(use_bidirectional_attention=False)
    return spec_of(
        fields,
        layers,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        tied_by_default=True,
        activation_field="hidden_activation",
        activation="gelu_tanh",
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        **attention_biases(fields),
    )


def phi3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096)
    section = rope_section(own)
    if (kind := kind_of(section)) not in ("default", "longrope"):
        raise section.error("rope_type", kind, "'default' or 'longrope'")
    spec = spec_of(own, uniform_layers(own, own.integer_or_none("sliding_window"), partial=1.0))
    qkv = ("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads), ("v_proj", spec.num_kv_heads)
    return replace(spec, arrangement=Arrangement(joined=(("qkv_proj", qkv), GATE_UP)))


def olmo2(fields: Fields) -> DecoderSpec:
    return _olmo(fields, uniform_layers(fields))


def olmo3(fields: Fields) -> DecoderSpec:
    """Read OLMo 3: every fourth layer has full attention; only these layers use the config's RoPE scaling."""
    own = fields.with_defaults(rope_theta=5e5, rope_local_base_freq=5e5)
    return _olmo(fields, _layers_with_two_ropes(own, pattern=4))


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
    layers = [layer if turns else unrotated(layer) for layer, turns in zip(spec.layers, rotates, strict=False)]
    window, may_slide = own.integer_or_none("sliding_window"), own.flag("use_sliding_window", False)
    are_full = [bool(turns) or not may_slide for turns in rotates[: len(layers)]]
    return replace(spec, layers=pick_layers(own, layers, are_full, window=window))


def unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, rope=Rope(0, layer.rope.theta))


def granite(fields: Fields) -> DecoderSpec:
    return multiplied(fields, llama(fields))


def multiplied(fields: Fields, spec: DecoderSpec) -> DecoderSpec:
    """Apply Granite's multipliers. Instead of multiplying each layer's update by residual_multiplier, divide the whole
    residual stream by it, which norms cancel if their eps is divided by its square."""
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
    layers, window = uniform_layers(own), _mistral_window(own)
    return spec_of(own, pick_layers(own, layers, [window is None] * len(layers), window=window))


def ministral3(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262144, sliding_window=None)
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
    """Return the spec for a family whose checkpoints store rotated pairs as neighbours, (2i, 2i + 1)."""
    return replace(spec, arrangement=replace(spec.arrangement, neighbours=(spec.head_dim, spec.layers[0].rope.dim)))


def glm4(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(
        head_dim=128, rms_norm_eps=1.5625e-7, max_position_embeddings=131072, attention_bias=True
    )
    norms = (
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    )
    arrangement = Arrangement(norms, (GATE_UP,))
    biased, layers = own.flag("attention_bias", True), uniform_layers(own, partial=0.5)
    return with_neighbours(spec_of(own, layers, sandwich_norms=True, qkv_bias=biased, arrangement=arrangement))


def hunyuan_dense(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(rms_norm_eps=1e-5)
    section, dim = rope_section(own), head_dim_of(own)
    if kind_of(section) == "dynamic" and "alpha" in section:  # despite its name, it does not depend on the length
        theta = section.number("rope_theta", own.number("rope_theta", 10000.0))
        rope = Rope(dim, theta * section.number("alpha") ** (dim / max(dim - 2, 1)))
        layers: tuple[LayerSpec, ...] = (LayerSpec(rope),) * own.integer("num_hidden_layers")
    else:
        layers = uniform_layers(own)
    names = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
    return spec_of(
        own, layers, qk_norm=True, rotates_first=True, arrangement=Arrangement(names), **attention_biases(own)
    )


def opt(fields: Fields) -> DecoderSpec:
    """Read OPT: learned positions, LayerNorms before attention and MLP or after them, and an MLP with ReLU."""
    fields.fixed(layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
    own = fields.with_defaults(intermediate_size=fields.integer("ffn_dim"), rms_norm_eps=1e-5)
    num_layers, has_norms_before = fields.integer("num_hidden_layers"), fields.flag("do_layer_norm_before", True)
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.flag("enable_bias", True))
    width = fields.integer("word_embed_proj_dim", hidden_size)
    return spec_of(
        own,
        (LayerSpec(Rope(0, 1.0)),) * num_layers,
        tied_by_default=True,
        has_layer_norms=True,
        norms_stream=not has_norms_before,
        num_learned_positions=max_positions_of(own) + PADDING_ROWS,
        embedding_size=None if width == hidden_size else width,
        activation_field="activation_function",
        activation="relu",
        arrangement=_opt_arrangement(num_layers, has_norms_before),
        **biases,
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


def attention_biases(fields: Fields, default: bool = False) -> dict[str, Any]:
    """Return the biases of families in which all attention projections have a bias, or none."""
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.flag("attention_bias", default))


def spec_of(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    attention_scale: float | None = None,
    tied_by_default: bool = False,
    activation_field: str = "hidden_act",
    activation: Activation = "silu",
    **features: Any,  # the rest of DecoderSpec's fields
) -> DecoderSpec:
    """Build a spec from the fields that all families share, and check them."""
    if layers[0].heads is None:
        fields.only("per_layer_config", None, {})
    names = _ACTIVATIONS[activation]
    fields.only(activation_field, *names, default=names[0])
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    head_dim = head_dim_of(fields)
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions_of(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=layers,
        attention_scale=attention_scale or head_dim**-0.5,
        tied_head=fields.flag("tie_word_embeddings", tied_by_default),
        activation=activation,
        **features,
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


def uniform_layers(fields: Fields, window: int | None = None, partial: float | None = None) -> tuple[LayerSpec, ...]:
    rope = read_rope(fields, head_dim_of(fields), max_positions_of(fields), partial)
    return (LayerSpec(rope, window),) * fields.integer("num_hidden_layers")


def _qwen_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """Return Qwen's layers; if use_sliding_window, layer_types or else max_window_layers tells which have windows."""
    layers = uniform_layers(fields)
    if not fields.flag("use_sliding_window", False):
        return layers
    window, num_full = fields.integer("sliding_window", 4096), fields.integer("max_window_layers", 28)
    return pick_layers(fields, layers, [index < num_full for index in range(len(layers))], window=window)


def _layers_with_two_ropes(fields: Fields, pattern: int) -> tuple[LayerSpec, ...]:
    """Return layers of which every `pattern`-th has full attention; the others have a window and their own RoPE."""
    head_dim = head_dim_of(fields)
    local, overall = two_ropes(fields, head_dim, head_dim)
    layers, window = (LayerSpec(overall),) * fields.integer("num_hidden_layers"), fields.integer("sliding_window", 4096)
    are_full = [(index + 1) % pattern == 0 for index in range(len(layers))]
    return pick_layers(fields, layers, are_full, rope=local, window=window)


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
) -> tuple[LayerSpec, ...]:
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
