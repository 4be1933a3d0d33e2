"""From a config.json to a `DecoderSpec`, one small function per family of models.

A feature of the config that the decoder does not compute is refused by name, never ignored.
"""

from dataclasses import replace
from typing import Any

from penstock.executor.kernels import Activation
from penstock.executor.loading.fields import Fields
from penstock.executor.models.rope import Rope, read_rope, rope_of
from penstock.executor.models.spec import DecoderSpec, LayerSpec

_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
}


def llama(fields: Fields) -> DecoderSpec:
    biases = attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias", False)}
    return spec_of(fields, uniform_layers(fields), **biases)


def mistral(fields: Fields) -> DecoderSpec:
    return spec_of(fields, uniform_layers(fields, fields.integer_or_none("sliding_window")))


def qwen2(fields: Fields) -> DecoderSpec:
    return spec_of(fields, _qwen_layers(fields), qkv_bias=True)


def qwen3(fields: Fields) -> DecoderSpec:
    return spec_of(fields, _qwen_layers(fields), qk_norm=True, **attention_biases(fields))


def gemma2(fields: Fields) -> DecoderSpec:
    full = uniform_layers(fields)
    sliding = uniform_layers(fields, fields.integer("sliding_window", 4096))
    return replace(
        _gemma(fields, pick_layers(fields, full, sliding, [index % 2 == 0 for index in range(len(full))])),
        score_cap=fields.number("attn_logit_softcapping") if "attn_logit_softcapping" in fields else None,
        logit_cap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None,
    )


def gemma3(fields: Fields) -> DecoderSpec:
    fields.only("final_logit_softcapping", None)
    fields.only("attn_logit_softcapping", None)
    return replace(_gemma(fields, _gemma_layers(fields)), qk_norm=True)


def _gemma(fields: Fields, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    fields.only("use_bidirectional_attention", False, default=False)
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


def attention_biases(fields: Fields) -> dict[str, Any]:
    """Of the families that have them all or none."""
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.flag("attention_bias", False))


def spec_of(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    attention_scale: float | None = None,
    tied_by_default: bool = False,
    activation_field: str = "hidden_act",
    activation: Activation = "silu",
    **features: Any,  # the rest of DecoderSpec's fields
) -> DecoderSpec:
    """What all families read alike, and the checks that hold for all."""
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
    return fields.integer("max_position_embeddings", 2048)


def uniform_layers(fields: Fields, window: int | None = None) -> tuple[LayerSpec, ...]:
    rope = read_rope(fields, head_dim_of(fields), max_positions_of(fields))
    return (LayerSpec(rope, window),) * fields.integer("num_hidden_layers")


def _qwen_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """Qwen slides only when asked to, and then from layer `max_window_layers` on (or as `layer_types` lists)."""
    if not fields.flag("use_sliding_window", False):
        return uniform_layers(fields)
    window = fields.integer("sliding_window", 4096)
    full, sliding = uniform_layers(fields), uniform_layers(fields, window)
    first_sliding = fields.integer("max_window_layers", 28)
    return pick_layers(fields, full, sliding, [index >= first_sliding for index in range(len(full))])


def _gemma_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """Gemma slides in all but every sixth layer; sliding layers have a rotation of their own."""
    head_dim = head_dim_of(fields)
    local, overall = gemma_ropes(fields, head_dim, head_dim)
    num_layers = fields.integer("num_hidden_layers")
    full = (LayerSpec(overall),) * num_layers
    sliding = (LayerSpec(local, fields.integer("sliding_window", 4096)),) * num_layers
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return pick_layers(fields, full, sliding, [(index + 1) % pattern != 0 for index in range(num_layers)])


def gemma_ropes(fields: Fields, local_dim: int, overall_dim: int) -> tuple[Rope, Rope]:
    """(sliding layers, full layers), by the dimensions of their heads. transformers 5 nests them; before, the sliding theta had its own name."""
    nested = fields.section("rope_parameters")
    local = overall = None
    if nested is not None:
        local, overall = nested.section("sliding_attention"), nested.section("full_attention")
    overall = overall or fields.section("rope_scaling") or Fields({})
    local = local or Fields({})
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    theta = overall.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    max_positions = max_positions_of(fields)
    return rope_of(local, local_theta, local_dim, max_positions), rope_of(overall, theta, overall_dim, max_positions)


def pick_layers(
    fields: Fields, full: tuple[LayerSpec, ...], sliding: tuple[LayerSpec, ...], slides: list[bool]
) -> tuple[LayerSpec, ...]:
    """Per layer the full or the sliding kind; `layer_types` in the config wins over the family's rule."""
    kinds = fields.texts("layer_types")
    if kinds is not None:
        if len(kinds) != len(full) or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise fields.error(
                "layer_types", kinds, f"{len(full)} times 'full_attention' or 'sliding_attention', one per layer"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(s if slide else f for f, s, slide in zip(full, sliding, slides, strict=True))
