"""Converts Gemma 4's config.json to a `DecoderSpec` for text.

Full-attention layers have different heads than sliding ones, the last layers reuse the keys and values of earlier ones,
every layer has its own embedding per token, and experts run in addition to the dense MLP.
"""

from dataclasses import replace

from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import full_layers, spec_of, two_ropes
from penstock.executor.models.family_table import ModelFamily
from penstock.executor.models.spec import DecoderSpec, LayerHeads, LayerSpec
from penstock.executor.moe_spec import MoeSpec


def gemma4(fields: Fields, family: ModelFamily) -> DecoderSpec:
    num_layers = fields.integer("num_hidden_layers")
    are_full = full_layers(fields, "sliding_attention", [index % 6 == 5 for index in range(num_layers)])
    are_full[-1] = True  # whatever layer_types says
    num_shared = fields.integer("num_kv_shared_layers", 0, low=0, high=num_layers)
    num_own = num_layers - num_shared
    if set(are_full[num_own:]) - set(are_full[:num_own]):
        raise fields.error("num_kv_shared_layers", num_shared, "before those layers one of each kind")
    overrides = fields.section("per_layer_config") or Fields({})
    heads = tuple(_heads(fields, overrides, index, are_full, num_own) for index in range(num_layers))
    overrides.no_others()
    sizes = {(is_full, each.dim, each.num_kv) for each, is_full in zip(heads, are_full, strict=True)}
    if len(sizes) > len(set(are_full)):  # layers of a kind share their RoPE and may share their keys
        shown = ", ".join(f"{num} heads of {dim}" for _, dim, num in sorted(sizes))
        raise fields.error("per_layer_config", shown, "the same in all layers of a kind")
    dim_of = {is_full: dim for is_full, dim, _ in sizes}
    sliding, full = two_ropes(fields, dim_of.get(False, 2), dim_of[True])
    window, moe = fields.integer("sliding_window"), _moe(fields)
    size, wide = fields.integer("intermediate_size"), fields.flag("use_double_wide_mlp", False)
    mlp_sizes = [size] * num_own + [2 * size if wide else size] * num_shared
    layers = tuple(
        LayerSpec(full if is_full else sliding, None if is_full else window, moe, heads=each, mlp_size=mlp_size)
        for is_full, each, mlp_size in zip(are_full, heads, mlp_sizes, strict=True)
    )
    width, num_words = fields.integer("hidden_size_per_layer_input", 256, low=0), fields.integer("vocab_size")
    spec = spec_of(
        fields,
        family,
        layers,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        input_width=width,
        input_vocab_size=fields.integer("vocab_size_per_layer_input", 262144, low=num_words if width else 1),
        arrangement=_arrangement(family.arrangement, num_own, num_layers),
    )
    widest = max(heads, key=lambda each: each.dim * each.num_kv)
    return replace(spec, head_dim=widest.dim, num_kv_heads=widest.num_kv)


def _heads(fields: Fields, overrides: Fields, index: int, are_full: list[bool], num_own: int) -> LayerHeads:
    is_full, has_equal = are_full[index], fields.flag("attention_k_eq_v", False)
    dim, num_kv = fields.integer("head_dim", 256), fields.integer("num_key_value_heads", 4)
    if "per_layer_config" in fields:  # written by transformers; published files have the global_ fields
        own = overrides.section(str(index)) or Fields({})
        dim, num_kv = own.integer("head_dim", dim), own.integer("num_key_value_heads", num_kv)
        own.no_others()
    elif is_full:
        dim = fields.integer("global_head_dim", 512)
        num_kv = fields.integer("num_global_key_value_heads", num_kv) if has_equal else num_kv
    if dim % 2:
        raise fields.error("global_head_dim" if is_full else "head_dim", dim, "an even number")
    num_heads = fields.integer("num_attention_heads")
    if num_heads % num_kv:
        raise fields.error("num_key_value_heads", num_kv, f"a divisor of num_attention_heads ({num_heads})")
    pages = index if index < num_own else max(at for at in range(num_own) if are_full[at] == are_full[index])
    return LayerHeads(dim, num_kv, pages, index >= num_own, not (has_equal and is_full))


def _moe(fields: Fields) -> MoeSpec | None:
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.integer("num_experts")
    top_k = fields.integer("top_k_experts", high=num_experts)
    return MoeSpec(num_experts, top_k, fields.integer("moe_intermediate_size"), renormalize=True, is_beside=True)


def _arrangement(arrangement: Arrangement, num_own: int, num_layers: int) -> Arrangement:
    """Return the layout. Unused keys and values that the file may have for layers that reuse others' are ignored."""
    unused = tuple(
        f"{model}layers.{index}.self_attn.{part}_"
        for model in ("model.", "model.language_model.")
        for index in range(num_own, num_layers)
        for part in "kv"
    )
    return replace(arrangement, ignored=(*unused, *arrangement.ignored))
