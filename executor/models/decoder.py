"""The decoder shared by most families, which differ only in its settings (`DecoderSpec`): norms, attention, an MLP.

Sizes are those of one rank: heads and MLP columns are split over the ranks. The decoder's only state is weights and
tables; keys and values are stored in the pages that `forward` receives.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.batch import AdaptedRows, ForwardBatch, KvPages, LayerPages
from penstock.executor.cache_layout import CacheNeeds, LayerCache
from penstock.executor.kernels import UNGATED, Fp8Rows, NormedRows, Ops, Rows
from penstock.executor.kernels.cpu_layers import CpuLayers, DenseLayer, DenseSizes, join_layers
from penstock.executor.kernels.linear import Linear
from penstock.executor.models.attention import GroupedAttention, heads_of
from penstock.executor.models.draft_layer import DRAFT_VOCABULARY, DraftInputs
from penstock.executor.models.latent import LatentAttention
from penstock.executor.models.mlp import Mlp
from penstock.executor.models.moe import Experts, ExpertsBeside, MoeMlp
from penstock.executor.models.recurrent_layers import DeltaNet, Mamba, ShortConv, state_of
from penstock.executor.models.rope import Tables, rope_tables
from penstock.executor.models.spec import PADDING_ROWS, ConvSpec, DecoderSpec, DeltaSpec, MambaSpec
from penstock.executor.models.weights import Matrix, Weights
from penstock.executor.parallel import RankGroup

Mixer = GroupedAttention | LatentAttention | DeltaNet | Mamba | ShortConv  # the token mixer of a layer
RECURRENT: dict[type, Callable[..., Mixer]] = {DeltaSpec: DeltaNet, MambaSpec: Mamba, ConvSpec: ShortConv}


class LayerInputs:
    """Computes the per-layer embeddings of all layers from the token ids and the tokens' embeddings."""

    def __init__(self, spec: DecoderSpec, width: int, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps, self._width, self._hidden_size = ops, spec.norm_eps, width, spec.hidden_size
        rows = len(spec.layers) * width
        self._table = weights.tensor("model.embed_tokens_per_layer.weight", (spec.input_vocab_size, rows))
        self._project = weights.linear(spec.hidden_size, Matrix("model.per_layer_model_projection", rows))
        self._norm = weights.norm("model.per_layer_projection_norm.weight", width)

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens [T] and their embeddings [T, hidden] -> [T, layers, width]"""
        projected = (self._project(hidden) * self._hidden_size**-0.5).view(-1, self._width)
        projected = self._ops.rms_norm(projected, self._norm, self._eps)
        looked_up = self._table.index_select(0, tokens).view(-1, self._width) * self._width**0.5
        inputs: Tensor = (projected + looked_up) * 0.5**0.5
        return inputs.view(len(tokens), -1, self._width)


class LayerEnd:
    """The end of one layer: a gated projection of its inputs, if any, and a scale."""

    def __init__(self, spec: DecoderSpec, width: int, prefix: str, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps = ops, spec.norm_eps
        if width:
            self._gate = weights.linear(spec.hidden_size, Matrix(f"{prefix}per_layer_input_gate", width))
            self._project = weights.linear(width, Matrix(f"{prefix}per_layer_projection", spec.hidden_size))
            self._norm = weights.norm(f"{prefix}post_per_layer_input_norm.weight", spec.hidden_size)
        self._scalar = weights.float32(f"{prefix}layer_scalar", (1,)).item()

    def __call__(self, stream: Tensor, inputs: Tensor | None) -> Tensor:
        """stream [T, hidden] and the layer's inputs [T, width] -> [T, hidden]"""
        if inputs is not None:
            opened = self._ops.gate(torch.cat((self._gate(stream), inputs), dim=1), "gelu_tanh")
            stream = stream + self._ops.rms_norm(self._project(opened), self._norm, self._eps)
        return stream * self._scalar


class Decoder:
    def __init__(self, spec: DecoderSpec, weights: Weights, ops: Ops, num_positions: int, device: torch.device) -> None:
        self._spec, self._ops = spec, ops
        self.cache = cache_needs(spec, weights.dtype, weights.group)
        self.num_layers = len(self.cache.layers)  # the first ones: with own pages or a state
        tables = {rope: rope_tables(rope, num_positions, device) for rope in {layer.rope for layer in spec.layers}}
        self._layers = weights.layers(len(spec.layers), lambda index: _Layer(spec, index, weights, ops, tables))
        self._draft_inputs = DraftInputs(spec, weights, ops) if spec.has_draft_layer else None
        self._draft_layer = self._layers.pop() if spec.has_draft_layer else None
        rounded = weights.dtype if spec.rounds_scale else torch.float64
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=rounded).item()
        self._norm = (
            _LayerNorm(spec, "model.norm", weights)
            if spec.has_layer_norms
            else weights.norm("model.norm.weight", spec.hidden_size, spec.norm_offset)
        )
        # LoRA is not supported for layer-specific heads and for MLPs without a gate.
        is_plain = all(layer.heads is None for layer in spec.layers) and spec.activation not in UNGATED
        self.adapted = tuple(linear for layer in self._layers for linear in layer.adapted() if is_plain)
        for number, linear in enumerate(self.adapted):
            linear.number = number
        self._joined = self._join(self._layers, weights.group)
        drafting = [] if self._draft_layer is None else [self._draft_layer]
        self._joined_draft = self._join(drafting, weights.group, len(self._layers))
        self._inputs = LayerInputs(spec, spec.input_width, weights, ops) if spec.input_width else None
        self._vocabulary = _TokenEmbedding(spec, weights)

    @property
    def experts(self) -> list[Experts]:
        """The experts of each MoE layer."""
        layers = self._layers if self._draft_layer is None else [*self._layers, self._draft_layer]
        return [layer.experts for layer in layers if layer.experts is not None]

    def forward(self, batch: ForwardBatch, pages: KvPages) -> Tensor:
        """Return the hidden states of the tokens `batch.output_indices` after the final norm: [W, width of the head]."""
        residual = self._vocabulary.embed(batch)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        inputs = None if self._inputs is None else self._inputs(batch.tokens, residual)  # [T, layers, width]
        update: Tensor | None = None  # the previous layer's output, not yet added to the residual stream
        first, last = 0, len(self._layers) - 1
        if self._joined is not None:
            first = len(self._layers) if batch.output_indices is None else last
            update = self._joined(residual, batch, pages, first) if first else None
        batches = batch.by_layer(self.num_layers)
        for index in range(first, len(self._layers)):
            indices, layer = batch.output_indices if index == last else None, self._layers[index]
            own = None if inputs is None else inputs[:, index]
            update, residual = layer.forward(update, residual, batches[layer.pages], pages[layer.pages], indices, own)
        if isinstance(self._norm, _LayerNorm):
            assert update is not None
            return self._vocabulary.project(self._norm(residual + update))
        if update is None:
            return self._ops.rms_norm(residual, self._norm, self._spec.norm_eps)
        return self._ops.add_rms_norm(update, residual, self._norm, self._spec.norm_eps)[0]

    def draft_states(
        self, next_tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pages: KvPages, output_indices: Tensor | None
    ) -> Tensor:
        """Run the draft layer for all tokens of a batch: after the hidden states [T, hidden] that `forward` returned for
        them, or that the layer itself did, with the token ids [T] that follow them. Return the states [W, hidden] of
        `output_indices`, whose `logits` predict one token further."""
        assert self._draft_layer is not None and self._draft_inputs is not None
        stream = self._draft_inputs(self._vocabulary.rows(next_tokens), hidden)
        update: Tensor | None
        if self._joined_draft is not None:
            update = self._joined_draft(stream, batch, pages, 1)
            if output_indices is not None:
                update, stream = update.index_select(0, output_indices), stream.index_select(0, output_indices)
        else:
            own = batch.by_layer(self.num_layers)[-1]
            update, stream = self._draft_layer.forward(None, stream, own, pages[-1], output_indices, None)
        assert update is not None
        return self._ops.add_rms_norm(update, stream, self._draft_inputs.output_norm, self._spec.norm_eps)[0]

    def _join(self, layers: "list[_Layer]", group: RankGroup, first: int = 0) -> CpuLayers | None:
        """Return layers, from the number `first` on, as one C call, or None if C cannot compute them all. If only some tokens
        are wanted, the last layer is called separately."""
        spec = self._spec
        dense = [each for layer in layers if (each := layer.dense()) is not None]
        if group.world > 1 or len(dense) < len(layers):
            return None
        sizes = *heads_of(spec.num_heads, spec.num_kv_heads, group), spec.head_dim, spec.norm_eps, spec.attention_scale
        return join_layers(self._ops, dense, DenseSizes(*sizes, spec.activation, spec.output_gate), first)

    def draft_logits(self, states: Tensor) -> Tensor | None:
        """Return logits like `logits`, at least those of the tokens that are worth drafting."""
        return self._vocabulary.draft_logits(states)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, hidden] -> [S, vocabulary] on the first rank, None on the others."""
        logits, scale, cap = self._vocabulary.logits(hidden), self._spec.logit_scale, self._spec.logit_cap
        if logits is not None and scale != 1.0:
            logits *= scale
        return logits if logits is None or cap is None else (logits / cap).tanh_().mul_(cap)


class _LayerNorm:
    """Normalizes rows to mean 0 and variance 1, with a weight and a bias."""

    def __init__(self, spec: DecoderSpec, name: str, weights: Weights) -> None:
        self._eps, shape = spec.norm_eps, (spec.hidden_size,)
        self._weight, self._bias = (weights.tensor(f"{name}.{part}", shape) for part in ("weight", "bias"))

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _TokenEmbedding:
    """The embedding and the LM head, which is the same table if `tied_head`, else `lm_head`. Both are split over the
    ranks by vocabulary."""

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        self._group, self._size, self._dtype = weights.group, spec.vocab_size, weights.dtype
        hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
        self._table = weights.table("model.embed_tokens.weight", (self._size, width), is_head=spec.tied_head)
        self._first, end = self._group.share(self._size)
        self._last = end - self._first - 1
        head = Matrix("lm_head", self._size, "rows")
        self._head = self._table if spec.tied_head else weights.linear(width, head)
        self._draft_head = self._head
        if spec.has_draft_layer and self._size > DRAFT_VOCABULARY and self._group.world == 1:
            self._draft_head = self._head.first(DRAFT_VOCABULARY)
        self._positions = self._project_in = self._project_out = None
        if spec.num_learned_positions:
            self._positions = weights.tensor("model.embed_positions.weight", (spec.num_learned_positions, hidden))
        if width != hidden:
            self._project_in = weights.linear(width, Matrix("model.project_in", hidden))
            self._project_out = weights.linear(hidden, Matrix("model.project_out", width))

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the batch's tokens and, if they are learned, of their positions: [T, hidden]."""
        rows = self.rows(batch.tokens)
        if self._project_in is not None:
            rows = self._project_in(rows)
        if self._positions is not None:
            rows = rows + self._positions.index_select(0, batch.positions + PADDING_ROWS)
        return rows

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens [T] alone: [T, width]."""
        if self._group.world == 1:
            return self._table.rows(tokens, self._dtype)
        local = tokens - self._first
        rows = self._table.rows(local.clamp(0, self._last), self._dtype)
        rows.masked_fill_(((local < 0) | (local > self._last))[:, None], 0)
        return self._group.sum(rows)

    def project(self, hidden: Tensor) -> Tensor:
        """Return final hidden states in the width of the head."""
        return hidden if self._project_out is None else self._project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, width] -> [S, size] on the first rank, None on the others."""
        return self._group.gather_columns(self._head(hidden), self._size)

    def draft_logits(self, hidden: Tensor) -> Tensor | None:
        return self.logits(hidden) if self._draft_head is self._head else self._draft_head(hidden)


def cache_needs(spec: DecoderSpec, dtype: torch.dtype, group: RankGroup) -> CacheNeeds:
    """Return the needs of the layers that have pages of their own or a state."""
    heads = [spec.heads_of(index) for index in range(len(spec.layers))]
    own = [layer for layer, each in zip(spec.layers, heads, strict=True) if not each.reads_only]
    states = [(0, 0) if each.recurrent is None else state_of(spec, each.recurrent, dtype, group.world) for each in own]
    layers = (LayerCache(None if num else each.window, num) for each, (num, _) in zip(own, states, strict=True))
    width = max(heads_of(spec.num_heads, each.num_kv, group)[1] * each.dim for each in heads)
    return CacheNeeds(tuple(layers), max(size for _, size in states), 2 if spec.latent is None else 1, width)


def _mixer_of(spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> Mixer:
    recurrent = spec.layers[index].recurrent
    if recurrent is None:
        kind: type[GroupedAttention | LatentAttention] = GroupedAttention if spec.latent is None else LatentAttention
        return kind(spec, index, weights, ops, tables)
    return RECURRENT[type(recurrent)](spec, recurrent, index, weights, ops)


class _Layer:
    mlp: Mlp | MoeMlp | None = None
    experts: Experts | None = None
    _beside: ExpertsBeside | None = None

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        prefix, layer = f"model.layers.{index}.", spec.layers[index]
        self._spec, self._ops, self._group = spec, ops, weights.group

        def norm(name: str) -> Tensor:
            return weights.norm(f"{prefix}{name}.weight", spec.hidden_size, spec.norm_offset)

        def norm_before(name: str) -> Tensor | _LayerNorm:
            return _LayerNorm(spec, f"{prefix}{name}", weights) if spec.has_layer_norms else norm(name)

        # A norm that replaces the stream stands between two layers: the first one has none before it.
        has_input_norm = spec.has_pre_norms and not (spec.norms_stream and index == 0)
        self._input_norm = norm_before("input_layernorm") if has_input_norm else None
        self._attention_norm = norm("post_attention_layernorm") if spec.sandwich_norms else None
        before_mlp = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
        self._mlp_norm = norm_before(before_mlp) if spec.has_pre_norms and layer.has_mlp else None
        self._output_norm = norm("post_feedforward_layernorm") if spec.sandwich_norms else None
        self._attention = _mixer_of(spec, index, weights, ops, tables)
        moe, self.pages = layer.moe, spec.heads_of(index).pages
        if moe is not None and not moe.is_beside:
            self.mlp = MoeMlp(spec, moe, index, weights, ops)
            self.experts = self.mlp.experts
        elif layer.has_mlp:
            self.mlp = Mlp(spec, layer.mlp_size or spec.intermediate_size, f"{prefix}mlp.", weights, ops)
        if moe is not None and moe.is_beside:
            self._beside = ExpertsBeside(spec, moe, index, weights, ops)
            self.experts = self._beside.experts
        self._end = None if spec.input_width is None else LayerEnd(spec, spec.input_width, prefix, weights, ops)

    def adapted(self) -> list[Linear]:
        """Return the products that LoRA adapters may change: four in a plain layer, in the order of `_join`."""
        attention = self._attention
        first = [attention.qkv] if isinstance(attention, GroupedAttention) else []
        return [*first, attention.output, *([] if self.mlp is None else self.mlp.adapted())]

    def dense(self) -> DenseLayer | None:
        """Return the layer's parts for `_join`; None if it has experts, MLA or other features that C lacks."""
        mixer, mlp = self._attention, self.mlp
        before_attention, before_mlp = self._input_norm, self._mlp_norm
        if not (isinstance(before_attention, Tensor) and isinstance(before_mlp, Tensor)):
            return None
        if not isinstance(mlp, Mlp) or not mlp.is_gated:
            return None
        linears, num_adapted = (mixer.output, mlp.gate_up, mlp.down), len(self.adapted())
        norms = before_attention, self._attention_norm, before_mlp, self._output_norm
        if isinstance(mixer, GroupedAttention) and mixer.is_plain:
            return DenseLayer((mixer.qkv, *linears), num_adapted, norms, mixer.norms, mixer.tables, mixer.extras)
        if not isinstance(mixer, DeltaNet):
            return None
        return DenseLayer((mixer.input, *linears), num_adapted, norms, delta=mixer.layer)

    def forward(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        pages: LayerPages,
        output_indices: Tensor | None,
        inputs: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute one layer over the residual stream [T, hidden], to which `update` must still be added.

        Return this layer's update (None if already added) and the stream. With `output_indices`, both contain only these
        tokens, because the last layer's MLP output for other tokens is never read. `inputs` [T, width] are per layer.
        """
        ops, eps = self._ops, self._spec.norm_eps
        hidden: Rows
        norm = self._input_norm
        if update is not None:
            hidden, residual = self._norm_before(self._attention, update, residual, norm, batch.adapters)
        elif isinstance(norm, Tensor):
            hidden = ops.rms_norm(residual, norm, eps)
        else:
            hidden = residual if norm is None else norm(residual)
        attend: Callable[..., Tensor] = self._attention.attend  # the pages of attention and of a state differ
        attended = attend(hidden, batch, pages)
        adapters = batch.adapters
        if output_indices is not None:
            attended, residual = attended.index_select(0, output_indices), residual.index_select(0, output_indices)
            inputs = None if inputs is None else inputs.index_select(0, output_indices)
            adapters = batch.output_adapters
        update = self._attention.output(attended)
        if adapters is not None:
            adapters.add(self._attention.output.number, attended, update)
        update = self._group.sum(update)
        if self._attention_norm is not None:
            update = ops.rms_norm(update, self._attention_norm, eps)
        if self.mlp is None:
            return update, residual
        hidden, residual = self._norm_before(self.mlp, update, residual, self._mlp_norm, adapters)
        update = self._group.sum(self.mlp(hidden, adapters))
        if self._beside is not None:
            update = self._beside(update, residual)
        if self._output_norm is not None:
            update = ops.rms_norm(update, self._output_norm, eps)
        if self._end is not None:
            return None, self._end(residual + update, inputs)
        return update, residual

    def _norm_before(
        self,
        part: Mixer | Mlp | MoeMlp,
        update: Tensor,
        residual: Tensor,
        weight: Tensor | _LayerNorm | None,
        adapters: AdaptedRows | None,
    ) -> tuple[Rows, Tensor]:
        """Return the input of `part`, and the sum of update and stream. The input is normed rows, quantized to FP8 if
        `part` reads only that, or a few rows to which the product of `part` applies the norm itself."""
        if not isinstance(weight, Tensor):
            residual = residual + update
            hidden = residual if weight is None else weight(residual)
            return hidden, hidden if self._spec.norms_stream else residual
        blocks, eps, rows = self._ops.blocks, self._spec.norm_eps, len(update)
        if adapters is not None:  # they read normed, unquantized rows
            return self._ops.add_rms_norm(update, residual, weight, eps)
        if blocks is not None and part.takes_fp8 and rows > self._ops.max_plain_rows:
            quantized, residual = blocks.add_rms_norm_quantize(update, residual, weight, eps)
            return Fp8Rows(quantized, residual.dtype), residual
        if part.takes_normed and 0 < rows <= self._ops.max_normed_rows:
            normed = NormedRows(update, residual, torch.empty_like(residual), weight, eps)
            return normed, normed.total
        return self._ops.add_rms_norm(update, residual, weight, eps)
