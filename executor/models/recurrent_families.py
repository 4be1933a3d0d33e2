"""Converts a config.json to a `DecoderSpec`, for models that mix attention layers and recurrent layers."""

from dataclasses import replace

from penstock.executor.kernels.recurrent import MAX_HEAD, MAX_TAPS
from penstock.executor.loading.arrangement import Arrangement, stacked_experts
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import pick_layers, spec_of, uniform_layers, unrotated
from penstock.executor.models.moe_families import granite_moe_shared, qwen_moe, qwen_sparse, shared_expert
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec, MambaSpec

_QWEN = Arrangement(
    joined=stacked_experts("experts.gate_up_proj", "experts.down_proj", "mlp."),
    ignored=("mtp.", "model.visual.", "visual."),  # multi-token prediction, and images
)
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
    own = fields.with_defaults(head_dim=256)
    own.fixed(attention_bias=False)
    attends, every = uniform_layers(own, partial=0.25), own.integer("full_attention_interval", 4)
    rule = [(index + 1) % every == 0 for index in range(len(attends))]
    layers = pick_layers(own, attends, rule, "linear_attention", recurrent=_delta(own, is_grouped))
    return spec_of(own, layers, qk_norm=True, output_gate=True, norm_offset=1.0, arrangement=_QWEN)


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
    attends = uniform_layers(own)
    full = own.integers("full_attn_idxs") if "full_attn_idxs" in own else range(len(attends))
    conv = ConvSpec(own.integer("conv_L_cache", 3, high=MAX_TAPS), own.flag("conv_bias", False))
    layers = pick_layers(own, attends, [index in full for index in range(len(attends))], "conv", recurrent=conv)
    return replace(spec_of(own, layers, qk_norm=True, arrangement=_LFM2), intermediate_size=_lfm2_mlp(own))


def _lfm2_mlp(fields: Fields) -> int:
    """Return the MLP size: two thirds of the config's, times a factor, rounded up, unless the config disables that."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def granite_hybrid(fields: Fields) -> DecoderSpec:
    kinds, num_layers = fields.texts("layer_types"), fields.integer("num_hidden_layers")
    # The names in published files, and those that transformers 5 writes.
    names = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
    if kinds is None or len(kinds) != num_layers or not set(kinds) <= set(names):
        raise fields.error("layer_types", kinds, f"{num_layers} times 'attention' or 'mamba', one per layer")
    fields.only("position_embedding_type", None, "rope", "nope")
    spec = granite_moe_shared(fields.with_defaults(shared_intermediate_size=1024))
    layers = spec.layers
    if fields.text("position_embedding_type", "nope") == "nope":
        layers = tuple(unrotated(layer) for layer in layers)
    if not any(names[kind] for kind in kinds):
        return replace(spec, layers=layers)
    mamba = _mamba(fields)
    keys, values = mamba.key_heads * mamba.key_dim, mamba.value_heads * mamba.value_dim
    parts = ("x", values), ("b", keys), ("c", keys)
    products = ("z", values), *parts, ("dt", mamba.value_heads)
    joined = (
        ("mamba.in_proj", tuple((f"mamba.{name}_proj", size) for name, size in products)),
        ("mamba.conv1d", tuple((f"mamba.{name}_conv", size) for name, size in parts)),
    )
    return replace(
        spec,
        layers=tuple(
            replace(layer, recurrent=mamba) if names[kind] else layer for layer, kind in zip(layers, kinds, strict=True)
        ),
        arrangement=replace(spec.arrangement, joined=(*spec.arrangement.joined, *joined)),
    )


def _mamba(fields: Fields) -> MambaSpec:
    # Infinity in plain JSON, and in the form that transformers 5 writes.
    fields.only("time_step_limit", None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    values = fields.integer("mamba_expand", 2, high=16) * fields.integer("hidden_size")
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    if values % heads:
        raise fields.error("mamba_n_heads", heads, f"a divisor of mamba_expand * hidden_size ({values})")
    if heads % groups:
        raise fields.error("mamba_n_groups", groups, f"a divisor of mamba_n_heads ({heads})")
    fields.only("mamba_d_head", "auto", values // heads, default="auto")
    if values // heads > MAX_HEAD:
        raise fields.error("mamba_n_heads", heads, f"enough for heads of at most {MAX_HEAD} numbers")
    return MambaSpec(
        groups,
        heads,
        key_dim=fields.integer("mamba_d_state", 256, high=MAX_HEAD),
        value_dim=values // heads,
        taps=fields.integer("mamba_d_conv", 4, high=MAX_TAPS),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )
