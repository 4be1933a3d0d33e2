"""From a config.json to a `DecoderSpec`, for models in which layers that attend and layers with a state take turns."""

from dataclasses import replace
from typing import Any

from penstock.executor.kernels.recurrent import MAX_HEAD, MAX_TAPS
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import max_positions_of, spec_of
from penstock.executor.models.moe_families import qwen_moe, qwen_sparse, shared_expert
from penstock.executor.models.rope import read_rope, rope_of, rope_section
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec, LayerSpec
from penstock.executor.moe_spec import MoeSpec

# By reader: parts of tensors' names that the checkpoint has others for, and beginnings of names of what is not computed.
_TEXT = (("model.", "model.language_model."),)
_AHEAD_AND_IMAGES = ("mtp.", "model.visual.", "visual.")
STORED: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "qwen3_next": ((), ("mtp.",)),
    "qwen3_5": (_TEXT, _AHEAD_AND_IMAGES),
    "qwen3_5_moe": (_TEXT, _AHEAD_AND_IMAGES),
    "lfm2": (
        (
            ("model.norm.", "model.embedding_norm."),
            ("input_layernorm", "operator_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("q_norm", "q_layernorm"),
            ("k_norm", "k_layernorm"),
            ("o_proj", "out_proj"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ),
        (),
    ),
}


def qwen3_next(fields: Fields) -> DecoderSpec:
    spec = _qwen(fields, is_grouped=True)
    return qwen_sparse(fields, spec, shared_expert(fields, qwen_moe(fields, renormalize=True)))


def qwen3_5(fields: Fields) -> DecoderSpec:
    return _qwen(fields, is_grouped=False)


def qwen3_5_moe(fields: Fields) -> DecoderSpec:
    moe: MoeSpec = replace(shared_expert(fields, qwen_moe(fields)), renormalize=True)
    return qwen_sparse(fields, _qwen(fields, is_grouped=False, intermediate_size=moe.intermediate_size), moe)


def _qwen(fields: Fields, is_grouped: bool, **sizes: Any) -> DecoderSpec:
    fields.only("attention_bias", False, default=False)
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("full_attention_interval", 4)
    kinds = _kinds(fields, "linear_attention", [(index + 1) % every == 0 for index in range(num_layers)])
    section, head_dim = rope_section(fields), fields.integer("head_dim", 256)
    theta = section.number("rope_theta", fields.number("rope_theta", 10_000.0))
    partial = fields.number("partial_rotary_factor", 0.25)
    attends = LayerSpec(rope_of(section, theta, head_dim, max_positions_of(fields), partial))
    layers = tuple(attends if kind else replace(attends, recurrent=_delta(fields, is_grouped)) for kind in kinds)
    return replace(
        spec_of(
            fields, layers, attention_scale=head_dim**-0.5, qk_norm=True, output_gate=True, norm_offset=1.0, **sizes
        ),
        head_dim=head_dim,
    )


def _delta(fields: Fields, is_grouped: bool) -> DeltaSpec:
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    key_dim, value_dim = (fields.integer(f"linear_{of}_head_dim", 128, high=MAX_HEAD) for of in ("key", "value"))
    taps = fields.integer("linear_conv_kernel_dim", 4, high=MAX_TAPS)
    return DeltaSpec(key_heads, value_heads, key_dim, value_dim, taps, is_grouped)


def lfm2(fields: Fields) -> DecoderSpec:
    num_layers = fields.integer("num_hidden_layers")
    full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields else range(num_layers)
    kinds = _kinds(fields, "conv", [index in full for index in range(num_layers)])
    conv = ConvSpec(fields.integer("conv_L_cache", 3, high=MAX_TAPS), fields.flag("conv_bias", False))
    spec = spec_of(
        fields,
        (),
        intermediate_size=_lfm2_mlp(fields),
        qk_norm=True,
        tied_by_default=fields.flag("tie_embedding", True),
    )
    attends = LayerSpec(read_rope(fields, spec.head_dim, spec.max_positions, 1_000_000.0))
    layers = tuple(attends if kind else replace(attends, recurrent=conv) for kind in kinds)
    return replace(spec, layers=layers, norm_eps=fields.number("norm_eps", 1e-5))


def _lfm2_mlp(fields: Fields) -> int:
    """The MLP's width is two thirds of what the config says, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _kinds(fields: Fields, other: str, attends: list[bool]) -> list[bool]:
    """Whether each layer attends: by `layer_types` if the config has it, else by the family's rule."""
    kinds = fields.texts("layer_types")
    if kinds is None:
        return attends
    if len(kinds) != len(attends) or not set(kinds) <= {"full_attention", other}:
        raise fields.error("layer_types", kinds, f"{len(attends)} times 'full_attention' or {other!r}, one per layer")
    return [kind == "full_attention" for kind in kinds]
