"""From a config.json to a `DecoderSpec`, for models in which layers that attend and layers with a state take turns."""

from dataclasses import replace

from penstock.executor.kernels.recurrent import MAX_HEAD, MAX_TAPS
from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import spec_of, uniform_layers
from penstock.executor.models.moe_families import qwen_moe, qwen_sparse, shared_expert
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec

_EXPERTS = (
    ("mlp.experts.gate_up_proj", (("mlp.experts.#.gate_proj.weight", 1), ("mlp.experts.#.up_proj.weight", 1))),
    ("mlp.experts.down_proj", (("mlp.experts.#.down_proj.weight", 1),)),
)
_QWEN = Arrangement(joined=_EXPERTS, ignored=("mtp.", "model.visual.", "visual."))  # tokens ahead, and images
_LFM2 = Arrangement(
    renames=(
        ("model.embedding_norm.", "model.norm."),
        (".operator_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        ("q_layernorm", "q_norm"),
        ("k_layernorm", "k_norm"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("feed_forward.w1", "mlp.gate_proj"),
        ("feed_forward.w3", "mlp.up_proj"),
        ("feed_forward.w2", "mlp.down_proj"),
    )
)


def qwen3_next(fields: Fields) -> DecoderSpec:
    spec = _qwen(fields, is_grouped=True)
    return qwen_sparse(fields, spec, shared_expert(fields, qwen_moe(fields, renormalize=True)))


def qwen3_5(fields: Fields) -> DecoderSpec:
    return _qwen(fields, is_grouped=False)


def qwen3_5_moe(fields: Fields) -> DecoderSpec:
    moe = replace(shared_expert(fields, qwen_moe(fields)), renormalize=True)
    own = fields.with_defaults(intermediate_size=moe.intermediate_size)  # there are no other MLPs
    return qwen_sparse(own, _qwen(own, is_grouped=False), moe)


def _qwen(fields: Fields, is_grouped: bool) -> DecoderSpec:
    own = fields.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    own.only("attention_bias", False, default=False)
    (attends,) = set(uniform_layers(own))
    every = own.integer("full_attention_interval", 4)
    rule = [(index + 1) % every == 0 for index in range(own.integer("num_hidden_layers"))]
    recurs = replace(attends, recurrent=_delta(own, is_grouped))
    layers = tuple(attends if kind else recurs for kind in _kinds(own, "linear_attention", rule))
    return spec_of(own, layers, qk_norm=True, output_gate=True, norm_offset=1.0, layout=_QWEN)


def _delta(fields: Fields, is_grouped: bool) -> DeltaSpec:
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    key_dim, value_dim = (fields.integer(f"linear_{of}_head_dim", 128, high=MAX_HEAD) for of in ("key", "value"))
    taps = fields.integer("linear_conv_kernel_dim", 4, high=MAX_TAPS)
    return DeltaSpec(key_heads, value_heads, key_dim, value_dim, taps, is_grouped)


def lfm2(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(
        intermediate_size=12288,
        rms_norm_eps=fields.number("norm_eps", 1e-5),
        rope_theta=1e6,
        max_position_embeddings=128_000,
        tie_word_embeddings=fields.flag("tie_embedding", True),
    )
    (attends,) = set(uniform_layers(own))
    num_layers = own.integer("num_hidden_layers")
    full = own.integers("full_attn_idxs") if "full_attn_idxs" in own else range(num_layers)
    conv = ConvSpec(own.integer("conv_L_cache", 3, high=MAX_TAPS), own.flag("conv_bias", False))
    kinds = _kinds(own, "conv", [index in full for index in range(num_layers)])
    layers = tuple(attends if kind else replace(attends, recurrent=conv) for kind in kinds)
    return replace(spec_of(own, layers, qk_norm=True, layout=_LFM2), intermediate_size=_lfm2_mlp(own))


def _lfm2_mlp(fields: Fields) -> int:
    """Two thirds of what the config says, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
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
