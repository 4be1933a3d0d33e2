"""Converts a config.json to a `DecoderSpec`, for models that mix attention layers and recurrent layers."""

import re
from dataclasses import replace

from penstock.executor.kernels.recurrent import MAX_HEAD, MAX_TAPS
from penstock.executor.loading.arrangement import ARRANGEMENTS, Arrangement, Joined
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import pick_layers, spec_of, uniform_layers, unrotated
from penstock.executor.models.moe_families import (
    deepseek_v3_moe,
    first_dense,
    granite_moe_shared,
    qwen_moe,
    qwen_sparse,
    shared_expert,
)
from penstock.executor.models.rope import Rope
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec

# Values of time_step_limit without a limit: infinity in plain JSON, and in the form that transformers 5 writes.
_NO_LIMIT = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


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
    return spec_of(own, layers, qk_norm=True, output_gate=True, norm_offset=1.0, arrangement=ARRANGEMENTS["qwen"])


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
    spec = spec_of(own, layers, qk_norm=True, arrangement=ARRANGEMENTS["lfm2"])
    return replace(spec, intermediate_size=_lfm2_mlp(own))


def lfm2_moe(fields: Fields) -> DecoderSpec:
    own = fields.with_defaults(
        intermediate_size=7168,
        block_auto_adjust_ff_dim=False,
        first_k_dense_replace=fields.integer("num_dense_layers", 2, low=0),
    )
    moe = replace(
        qwen_moe(own, renormalize=True),
        scoring="sigmoid",
        has_bias=own.flag("use_expert_bias", True),
        renormalize_eps=1e-6,
        scale=own.number("routed_scaling_factor", 1.0),
    )
    spec = lfm2(own)
    return replace(spec, layers=first_dense(own, spec.layers, moe))


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
    return replace(
        spec,
        layers=tuple(
            replace(layer, recurrent=mamba) if names[kind] else layer for layer, kind in zip(layers, kinds, strict=True)
        ),
        arrangement=replace(spec.arrangement, joined=(*spec.arrangement.joined, *_joined_in_mamba(mamba))),
    )


def _joined_in_mamba(mamba: MambaSpec) -> tuple[Joined, Joined]:
    keys, values = mamba.key_heads * mamba.key_dim, mamba.value_heads * mamba.value_dim
    parts = ("x", values), ("b", keys), ("c", keys)
    products = ("z", values), *parts, ("dt", mamba.value_heads)
    return (
        ("mamba.in_proj", tuple((f"mamba.{name}_proj", size) for name, size in products)),
        ("mamba.conv1d", tuple((f"mamba.{name}_conv", size) for name, size in parts)),
    )


def _mamba(fields: Fields) -> MambaSpec:
    fields.only("time_step_limit", *_NO_LIMIT)
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


def nemotron_h(fields: Fields) -> DecoderSpec:
    """Read Nemotron-H. The file's blocks are Mamba 2, attention, an MLP or experts, each with a norm and a residual. One of
    our layers is a block of Mamba 2 or attention and, if an MLP or experts follow it, that block."""
    own = fields.with_defaults(
        head_dim=fields.integer("attention_head_dim", 128),
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=4096,
    )
    own.only("sliding_window", None)
    own.only("time_step_limit", *_NO_LIMIT)
    own.fixed(attention_bias=False, mlp_bias=False, mamba_proj_bias=False, mamba_hidden_act="silu")
    heads, groups = own.integer("mamba_num_heads", 128), own.integer("n_groups", 8)
    if heads % groups:
        raise own.error("n_groups", groups, f"a divisor of mamba_num_heads ({heads})")
    mamba = MambaSpec(
        groups,
        heads,
        key_dim=own.integer("ssm_state_size", 128, high=MAX_HEAD),
        value_dim=own.integer("mamba_head_dim", 64, high=MAX_HEAD),
        taps=own.integer("conv_kernel", 4, high=MAX_TAPS),
        conv_bias=own.flag("use_conv_bias", True),
        bias=own.flag("use_bias", False),
        norm_eps=own.number("rms_norm_eps"),
    )
    blocks = _nemotron_blocks(own)
    moe = None
    if any("E" in each for each in blocks):
        shared_size = own.integer("moe_shared_expert_intermediate_size")
        latent_size = own.integer_or_none("moe_latent_size") or 0
        moe = replace(deepseek_v3_moe(own), shared_size=shared_size, latent_size=latent_size)
    layers = tuple(
        LayerSpec(
            Rope(0, 1.0),
            moe=moe if "E" in each else None,
            recurrent=mamba if "M" in each else None,
            has_mlp=len(each) > 1,
        )
        for each in blocks
    )
    arrangement = _nemotron_arrangement(blocks, mamba)
    return spec_of(own, layers, activation_field="mlp_hidden_act", activation="relu2", arrangement=arrangement)


def _nemotron_blocks(fields: Fields) -> list[str]:
    """Return the blocks of each of our layers: M (Mamba 2) or * (attention), then - (an MLP), E (experts) or nothing."""
    names = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
    listed = next((name for name in ("layers_block_type", "layer_types") if name in fields), None)
    kinds = fields.text("hybrid_override_pattern") if listed is None else fields.texts(listed) or []
    blocks = "".join(names.get(kind, kind) for kind in kinds)
    if re.fullmatch(r"([M*][-E]?)+", blocks) is None:
        expected = "Mamba 2 (M) and attention (*), each alone or before an MLP (-) or experts (E)"
        raise fields.error(listed or "hybrid_override_pattern", kinds, expected)
    return re.findall(r"[M*][-E]?", blocks)


def _nemotron_arrangement(layers: list[str], mamba: MambaSpec) -> Arrangement:
    renames = [("backbone.", "model."), (".embeddings.", ".embed_tokens."), (".norm_f.", ".norm.")]
    mlp = "post_attention_layernorm", "mlp"
    names = {"M": ("input_layernorm", "mamba"), "*": ("input_layernorm", "self_attn"), "-": mlp, "E": mlp}
    places = [(index, *names[kind]) for index, blocks in enumerate(layers) for kind in blocks]
    for block, (index, norm, mixer) in enumerate(places):
        renames.append((f".layers.{block}.norm.", f".layers.{index}.{norm}."))
        renames.append((f".layers.{block}.mixer.", f".layers.{index}.{mixer}."))
    experts = ((f"mlp.experts.{each}_proj", ((f"mlp.experts.#.{each}_proj.weight", 1),)) for each in ("up", "down"))
    return Arrangement(tuple(renames), (*experts, *_joined_in_mamba(mamba)), ignored=("mtp.",))
