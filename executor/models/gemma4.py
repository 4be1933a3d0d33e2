"""Gemma 4, of text: full layers have other heads than sliding ones, the last layers read the keys and values of earlier
ones, every layer gets a vector of its own for each token, and experts stand beside the dense MLP.

Pages are as wide as the widest layer's keys; narrower ones use their beginning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages, StatePages
from penstock.executor.cache_layout import LayerCache
from penstock.executor.kernels import KeyStore, Ops, Pages, Rotation, ScoreExtras
from penstock.executor.kernels.linear import Linear, make_linear
from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.attention import heads_of
from penstock.executor.models.families import max_positions_of, spec_of, two_ropes
from penstock.executor.models.mlp import Mlp, projections
from penstock.executor.models.moe import Experts
from penstock.executor.models.rope import Tables, rope_tables
from penstock.executor.models.spec import DecoderSpec, LayerSpec
from penstock.executor.models.vocabulary import Vocabulary
from penstock.executor.models.weights import Weights
from penstock.executor.moe_spec import MoeSpec

LAYER_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """What a layer's attention is like beyond its LayerSpec."""

    dim: int
    num_kv: int
    pages: int  # number of the layer's pages
    reads_only: bool  # those are an earlier layer's
    has_values: bool  # else the keys, before norm and rotation, are the values


@dataclass(frozen=True, slots=True)
class Gemma4Spec(DecoderSpec):
    """`head_dim` and `num_kv_heads` are the widest layer's."""

    heads: tuple[LayerHeads, ...] = ()
    input_width: int = 0  # of what a layer gets for each token; 0: nothing
    input_vocab_size: int = 0
    wide_from: int = 0  # layers from here on have an MLP of twice the width


def gemma4(fields: Fields) -> Gemma4Spec:
    fields.only("use_bidirectional_attention", None, "vision")
    num_layers = fields.integer("num_hidden_layers")
    kinds = fields.texts("layer_types") or [LAYER_KINDS[index % 6 == 5] for index in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(LAYER_KINDS):
        raise fields.error("layer_types", kinds, f"{num_layers} times {' or '.join(map(repr, LAYER_KINDS))}")
    num_shared = fields.integer("num_kv_shared_layers", 0, low=0, high=num_layers)
    num_own = num_layers - num_shared
    if set(kinds[num_own:]) - set(kinds[:num_own]):
        raise fields.error("num_kv_shared_layers", num_shared, "before those layers one of each kind")
    heads = tuple(_heads(fields, index, kinds, num_own) for index in range(num_layers))
    dims = [next((each.dim for each, of in zip(heads, kinds, strict=True) if of == kind), 2) for kind in LAYER_KINDS]
    sliding, full = two_ropes(fields, *dims)
    window, moe = fields.integer("sliding_window", 512), _moe(fields)
    layers = tuple(
        LayerSpec(full, None, moe) if kind == "full_attention" else LayerSpec(sliding, window, moe) for kind in kinds
    )
    biases = fields.flag("attention_bias", False)
    base = spec_of(
        fields,
        layers,
        attention_scale=1.0,  # queries and keys are normalized
        tied_by_default=True,
        activation_field="hidden_activation",
        activation="gelu_tanh",
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        logit_cap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None,
        qkv_bias=biases,
        output_bias=biases,
        arrangement=_arrangement(num_own, num_layers),
    )
    widest = max(heads, key=lambda each: each.dim * each.num_kv)
    values = {name: getattr(base, name) for name in DecoderSpec.__slots__}
    return Gemma4Spec(
        **values | {"head_dim": widest.dim, "num_kv_heads": widest.num_kv, "max_positions": max_positions_of(fields)},
        heads=heads,
        input_width=fields.integer("hidden_size_per_layer_input", 256, low=0),
        input_vocab_size=fields.integer("vocab_size_per_layer_input", 262144),
        wide_from=num_own if fields.flag("use_double_wide_mlp", False) else num_layers,
    )


def _heads(fields: Fields, index: int, kinds: list[str], num_own: int) -> LayerHeads:
    is_full, has_equal = kinds[index] == "full_attention", fields.flag("attention_k_eq_v", False)
    dim, num_kv = fields.integer("head_dim", 256), fields.integer("num_key_value_heads", 4)
    if is_full:  # as transformers writes it, or as the published files have it
        whole = fields.section("per_layer_config")
        own = None if whole is None else whole.section(str(index))
        dim = fields.integer("global_head_dim", 512) if whole is None else dim
        if has_equal and whole is None:
            num_kv = fields.integer("num_global_key_value_heads", num_kv)
        if own is not None:
            dim, num_kv = own.integer("head_dim", dim), own.integer("num_key_value_heads", num_kv)
    if dim % 2:
        raise fields.error("global_head_dim" if is_full else "head_dim", dim, "an even number")
    num_heads = fields.integer("num_attention_heads")
    if num_heads % num_kv:
        raise fields.error("num_key_value_heads", num_kv, f"a divisor of num_attention_heads ({num_heads})")
    pages = index if index < num_own else max(at for at in range(num_own) if kinds[at] == kinds[index])
    return LayerHeads(dim, num_kv, pages, index >= num_own, not (has_equal and is_full))


def _moe(fields: Fields) -> MoeSpec | None:
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.integer("num_experts")
    top_k = fields.integer("top_k_experts", high=num_experts)
    return MoeSpec(num_experts, top_k, fields.integer("moe_intermediate_size"), renormalize=True)


def _arrangement(num_own: int, num_layers: int) -> Arrangement:
    """Layers that read others' keys and values may have some of their own in the file: they are never used."""
    unused = tuple(
        f"{model}layers.{index}.self_attn.{part}_"
        for model in ("model.", "model.language_model.")
        for index in range(num_own, num_layers)
        for part in "kv"
    )
    gate_up = ("experts.#.gate_proj.weight", 1), ("experts.#.up_proj.weight", 1)
    return Arrangement(
        joined=(("experts.gate_up_proj", gate_up), ("experts.down_proj", (("experts.#.down_proj.weight", 1),))),
        ignored=(*unused, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    )


class Gemma4:
    kv_parts = 2
    adapted: tuple[Linear, ...] = ()

    def __init__(self, spec: Gemma4Spec, weights: Weights, ops: Ops, num_positions: int, device: torch.device) -> None:
        self._spec, self._ops = spec, ops
        self.num_layers = sum(not each.reads_only for each in spec.heads)  # that have pages: the first ones
        self.caches, self.unit_bytes = tuple(LayerCache(each.window) for each in spec.layers[: self.num_layers]), 0
        self.kv_width = max(heads_of(spec.num_heads, each.num_kv, weights.group)[1] * each.dim for each in spec.heads)
        tables = {rope: rope_tables(rope, num_positions, device) for rope in {layer.rope for layer in spec.layers}}
        num_layers, width = len(spec.layers), spec.input_width
        self._layers = weights.layers(num_layers, lambda index: _Gemma4Layer(spec, index, weights, ops, tables))
        self._norm = weights.norm("model.norm.weight", spec.hidden_size)
        if width:
            shape = spec.input_vocab_size, num_layers * width
            self._inputs = weights.tensor("model.embed_tokens_per_layer.weight", shape)
            name = "model.per_layer_model_projection"
            self._project = weights.linear((name,), (num_layers * width,), spec.hidden_size)
            self._input_norm = weights.norm("model.per_layer_projection_norm.weight", width)
        name = "model.embed_tokens"
        self._vocabulary = Vocabulary(weights, name, spec.vocab_size, spec.hidden_size, spec.tied_head)
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=weights.dtype).item()

    @property
    def experts(self) -> list[Experts]:
        return [layer.experts.experts for layer in self._layers if layer.experts is not None]

    def forward(self, batch: ForwardBatch, pages: KvPages) -> Tensor:
        hidden = self._vocabulary.embed(batch.tokens) * self._embedding_scale
        inputs = self._inputs_of(batch.tokens, hidden) if self._spec.input_width else None  # [T, layers, width]
        batches = batch.by_layer(self.num_layers)
        for index, layer in enumerate(self._layers):
            wanted = batch.wanted if index == len(self._layers) - 1 else None
            own, place = None if inputs is None else inputs[:, index], self._spec.heads[index].pages
            kept = pages[place]
            assert not isinstance(kept, StatePages)
            hidden = layer.forward(hidden, own, batches[place], kept, wanted)
        return self._ops.rms_norm(hidden, self._norm, self._spec.norm_eps)

    def _inputs_of(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What each layer gets for each token: from the token's number, and from its embedding."""
        spec, width = self._spec, self._spec.input_width
        projected = (self._project(hidden) * spec.hidden_size**-0.5).view(-1, width)
        projected = self._ops.rms_norm(projected, self._input_norm, spec.norm_eps)
        looked_up = self._inputs.index_select(0, tokens).view(-1, width) * width**0.5
        inputs: Tensor = (projected + looked_up) * 0.5**0.5
        return inputs.view(len(tokens), -1, width)

    def logits(self, hidden: Tensor) -> Tensor | None:
        logits, cap = self._vocabulary.logits(hidden), self._spec.logit_cap
        return logits if logits is None or cap is None else (logits / cap).tanh_().mul_(cap)


build = Gemma4


class _Gemma4Layer:
    def __init__(self, spec: Gemma4Spec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        self._spec, self._ops, self._group, self._eps = spec, ops, weights.group, spec.norm_eps
        prefix, hidden, width = f"model.layers.{index}.", spec.hidden_size, spec.input_width

        def norm(name: str) -> Tensor:
            return weights.norm(f"{prefix}{name}.weight", hidden)

        self._attention = _Attention(spec, index, weights, ops, tables[spec.layers[index].rope])
        self._norms = norm("input_layernorm"), norm("post_attention_layernorm")
        self._mlp_norms = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        size = spec.intermediate_size * (2 if index >= spec.wide_from else 1)
        self._mlp = Mlp(spec, size, projections(f"{prefix}mlp."), weights, ops)
        moe = spec.layers[index].moe
        self.experts = None if moe is None else _MoeBeside(spec, moe, index, weights, ops)
        self._expert_norms = (
            []
            if moe is None
            else [norm(f"{each}_feedforward_layernorm_{of}") for each, of in (("post", 1), ("pre", 2), ("post", 2))]
        )
        if width:
            self._gate = weights.linear((f"{prefix}per_layer_input_gate",), (width,), hidden)
            self._project = weights.linear((f"{prefix}per_layer_projection",), (hidden,), width)
            self._input_norm = norm("post_per_layer_input_norm")
        self._scalar = weights.float32(f"{prefix}layer_scalar", (1,)).item()

    def forward(
        self, stream: Tensor, own: Tensor | None, batch: ForwardBatch, pages: Pages, wanted: Tensor | None
    ) -> Tensor:
        """The residual stream [T, hidden] behind this layer, of the `wanted` tokens if given. own [T, width]: what this
        layer gets for them."""
        ops, eps = self._ops, self._eps
        attended = self._attention.attend(ops.rms_norm(stream, self._norms[0], eps), batch, pages)
        if wanted is not None:
            attended, stream = attended.index_select(0, wanted), stream.index_select(0, wanted)
            own = None if own is None else own.index_select(0, wanted)
        update = ops.rms_norm(self._group.sum(self._attention.output(attended)), self._norms[1], eps)
        hidden, stream = ops.add_rms_norm(update, stream, self._mlp_norms[0], eps)
        update = self._group.sum(self._mlp(hidden))
        if self.experts is not None:
            after_mlp, before, after = self._expert_norms
            chosen = self.experts(ops.rms_norm(stream, before, eps), stream)
            update = ops.rms_norm(update, after_mlp, eps) + ops.rms_norm(self._group.sum(chosen), after, eps)
        stream = stream + ops.rms_norm(update, self._mlp_norms[1], eps)
        if own is not None:
            opened = ops.gate(torch.cat((self._gate(stream), own), dim=1), "gelu_tanh")
            stream = stream + ops.rms_norm(self._project(opened), self._input_norm, eps)
        return stream * self._scalar


class _Attention:
    def __init__(self, spec: Gemma4Spec, index: int, weights: Weights, ops: Ops, tables: tuple[Tensor, Tensor]) -> None:
        heads, prefix = spec.heads[index], f"model.layers.{index}.self_attn."
        self._heads, self._spec, self._ops, self._tables = heads, spec, ops, tables
        self._extras = ScoreExtras(window=spec.layers[index].window)
        num_heads, num_kv = heads_of(spec.num_heads, heads.num_kv, weights.group)
        parts = "q" if heads.reads_only else "qkv" if heads.has_values else "qk"
        self._split = [num_heads, *(num_kv for _ in parts[1:])]
        self._width = num_kv * heads.dim
        units = (spec.num_heads, heads.num_kv, heads.num_kv)[: len(parts)]
        names, rows = tuple(f"{prefix}{part}_proj" for part in parts), tuple(each * heads.dim for each in units)
        self._qkv = weights.linear(names, rows, spec.hidden_size, spec.qkv_bias, split="rows", units=units)
        q_norm = weights.norm(f"{prefix}q_norm.weight", heads.dim)
        k_norm = None if heads.reads_only else weights.norm(f"{prefix}k_norm.weight", heads.dim)
        self._norms = q_norm, k_norm, spec.norm_eps
        self._value_norm = torch.ones_like(q_norm)
        self.output = weights.linear(
            (f"{prefix}o_proj",), (spec.hidden_size,), rows[0], spec.output_bias, split="columns"
        )

    def attend(self, hidden: Tensor, batch: ForwardBatch, pages: Pages) -> Tensor:
        """[T, hidden] -> [T, heads * dim]"""
        dim, ops = self._heads.dim, self._ops
        q, *kv = torch.split_with_sizes(self._qkv(hidden).unflatten(1, (-1, dim)), self._split, dim=1)
        seen = pages[0][..., : self._width], pages[1][..., : self._width]
        k, v, written = q[:, :0], None, (seen[0][..., :0], seen[1][..., :0])  # nothing to store
        if kv:
            values = ops.rms_norm(kv[-1].reshape(-1, dim), self._value_norm, self._norms[2])
            k, v, written = kv[0], values.view(len(hidden), -1, dim), seen
        rotation = Rotation(*self._tables, batch.positions)
        q = ops.rope_and_store(q, k, v, KeyStore(rotation, written, batch.kv_slots, self._norms))
        return ops.paged_attention(q, seen, batch, self._spec.attention_scale, self._extras).flatten(1)


class _MoeBeside:
    """Experts whose router reads the residual stream, normalized in its own way; a share grows with its expert."""

    def __init__(self, spec: Gemma4Spec, moe: MoeSpec, index: int, weights: Weights, ops: Ops) -> None:
        prefix = f"model.layers.{index}."
        self._moe, self._ops, self._eps = moe, ops, spec.norm_eps
        scale = weights.float32(f"{prefix}router.scale", (spec.hidden_size,)) * spec.hidden_size**-0.5
        router = weights.float32(f"{prefix}router.proj.weight", (moe.num_experts, spec.hidden_size))
        self._router = make_linear(router * scale, None, ops)
        self._no_scale = torch.ones_like(scale)
        self._growth = weights.float32(f"{prefix}router.per_expert_scale", (moe.num_experts,))
        self.experts = Experts(spec, moe, prefix, index, weights, ops)

    def __call__(self, hidden: Tensor, stream: Tensor) -> Tensor:
        """[T, hidden] of experts for `hidden`, chosen by `stream`; a rank's part of the sum."""
        logits = self._router(self._ops.rms_norm(stream, self._no_scale, self._eps).float())
        ids, shares = self._ops.choose_experts(logits, None, self._moe)
        return self.experts(hidden, ids, shares * self._growth[ids.long()])
