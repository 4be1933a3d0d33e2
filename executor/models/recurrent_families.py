"""Converts a config.json to a `DecoderSpec`, for models that mix attention layers and recurrent layers."""

import re
from dataclasses import replace
from typing import Any, TypeVar

from penstock.executor.kernels.recurrent import MAX_HEAD, MAX_TAPS
from penstock.executor.loading.arrangement import Arrangement, Joined
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import layers_of, pick_layers, read_family, spec_of, unrotated
from penstock.executor.models.family_table import ModelFamily, values_of
from penstock.executor.models.moe_families import deepseek_v3_experts, granite_moe
from penstock.executor.models.rope import Rope
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec

# Values of time_step_limit without a limit: infinity in plain JSON, and in the form that transformers 5 writes.
_NO_LIMIT = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
_HIGHEST = {"key_dim": MAX_HEAD, "value_dim": MAX_HEAD, "taps": MAX_TAPS}
RecurrentSpec = TypeVar("RecurrentSpec", DeltaSpec, MambaSpec, ConvSpec)


def _recurrent(fields: Fields, family: ModelFamily, spec: type[RecurrentSpec], **values: Any) -> RecurrentSpec:
    return spec(**values_of(fields, spec, family.recurrent, _HIGHEST), **values)


def qwen_recurrent(fields: Fields, family: ModelFamily) -> DecoderSpec:
    delta = _recurrent(fields, family, DeltaSpec)
    if delta.value_heads % delta.key_heads:
        expected = f"a multiple of linear_num_key_heads ({delta.key_heads})"
        raise fields.error("linear_num_value_heads", delta.value_heads, expected)
    layers, every = layers_of(fields, family.layers), fields.integer("full_attention_interval")
    rule = [(index + 1) % every == 0 for index in range(len(layers))]
    return read_family(fields, family, pick_layers(fields, layers, rule, "linear_attention", recurrent=delta))


def lfm2(fields: Fields, family: ModelFamily) -> DecoderSpec:
    attends, conv = layers_of(fields, family.layers), _recurrent(fields, family, ConvSpec)
    full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields else range(len(attends))
    layers = pick_layers(fields, attends, [index in full for index in range(len(attends))], "conv", recurrent=conv)
    return read_family(fields, family, layers, intermediate_size=_lfm2_mlp(fields))


def _lfm2_mlp(fields: Fields) -> int:
    """Return the MLP size: two thirds of the config's, times a factor, rounded up, unless the config disables that."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def granite_hybrid(fields: Fields, family: ModelFamily) -> DecoderSpec:
    kinds, num_layers = fields.texts("layer_types"), fields.integer("num_hidden_layers")
    # The names in published files, and those that transformers 5 writes.
    names = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
    if kinds is None or len(kinds) != num_layers or not set(kinds) <= set(names):
        raise fields.error("layer_types", kinds, f"{num_layers} times 'attention' or 'mamba', one per layer")
    spec = granite_moe(fields, family)
    layers = spec.layers
    if fields.text("position_embedding_type", "nope") == "nope":
        layers = tuple(unrotated(layer) for layer in layers)
    have_mamba = [names[kind] for kind in kinds]
    if not any(have_mamba):
        return replace(spec, layers=layers)
    mamba = _granite_mamba(fields, family)
    pairs = zip(layers, have_mamba, strict=True)
    layers = tuple(replace(layer, recurrent=mamba) if has_mamba else layer for layer, has_mamba in pairs)
    joined = (*spec.arrangement.joined, *_joined_in_mamba(mamba))
    return replace(spec, layers=layers, arrangement=replace(spec.arrangement, joined=joined))


def _joined_in_mamba(mamba: MambaSpec) -> tuple[Joined, Joined]:
    keys, values = mamba.key_heads * mamba.key_dim, mamba.value_heads * mamba.value_dim
    parts = ("x", values), ("b", keys), ("c", keys)
    products = ("z", values), *parts, ("dt", mamba.value_heads)
    return (
        ("mamba.in_proj", tuple((f"mamba.{name}_proj", size) for name, size in products)),
        ("mamba.conv1d", tuple((f"mamba.{name}_conv", size) for name, size in parts)),
    )


def _granite_mamba(fields: Fields, family: ModelFamily) -> MambaSpec:
    values = fields.integer("mamba_expand", high=16) * fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads")
    if values % heads:
        raise fields.error("mamba_n_heads", heads, f"a divisor of mamba_expand * hidden_size ({values})")
    mamba = _mamba(fields, family, value_dim=values // heads)
    fields.only("mamba_d_head", "auto", mamba.value_dim, default="auto")
    if mamba.value_dim > MAX_HEAD:
        raise fields.error("mamba_n_heads", heads, f"enough for heads of at most {MAX_HEAD} numbers")
    return mamba


def _mamba(fields: Fields, family: ModelFamily, **values: Any) -> MambaSpec:
    fields.only("time_step_limit", *_NO_LIMIT)
    mamba = _recurrent(fields, family, MambaSpec, **values)
    if mamba.value_heads % mamba.key_heads:
        groups, heads = (str(family.recurrent[name]) for name in ("key_heads", "value_heads"))
        raise fields.error(groups, mamba.key_heads, f"a divisor of {heads} ({mamba.value_heads})")
    return mamba


def nemotron_h(fields: Fields, family: ModelFamily) -> DecoderSpec:
    """Read Nemotron-H. The file's blocks are Mamba 2, attention, an MLP or experts, each with a norm and a residual. One of
    our layers is a block of Mamba 2 or attention and, if an MLP or experts follow it, that block."""
    own = fields.with_defaults(head_dim=fields.integer("attention_head_dim"))
    mamba, blocks, moe = _mamba(own, family), _nemotron_blocks(own), None
    if any("E" in each for each in blocks):
        shared_size = own.integer("moe_shared_expert_intermediate_size")
        latent_size = own.integer_or_none("moe_latent_size") or 0
        moe = deepseek_v3_experts(own, family)._replace(shared_size=shared_size, latent_size=latent_size)
    mixers = {"M": LayerSpec(Rope(0, 1.0), recurrent=mamba), "*": LayerSpec(Rope(0, 1.0))}
    parts: dict[str, dict[str, Any]] = {"": {"has_mlp": False}, "-": {}, "E": {"moe": moe}}
    layers = tuple(replace(mixers[each[0]], **parts[each[1:]]) for each in blocks)
    return spec_of(own, family, layers, arrangement=_nemotron_arrangement(blocks, mamba))


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
