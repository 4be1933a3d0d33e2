"""The decoder that Llama, Mistral, Qwen and Gemma are settings of: RMS norms, rotary attention, a gated MLP.

Sizes are the rank's own: heads and MLP columns are shared out between ranks. There is no state here besides
weights and tables; keys and values live in the pages that `forward` is given.
"""

import torch

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import Ops
from penstock.executor.loading.weights import Weights
from penstock.executor.models.rope import Rope, rope_tables
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.vocabulary import Vocabulary
from penstock.executor.parallel import Group
from penstock.executor.protocol import ExecutorError


class Decoder:
    def __init__(self, spec: DecoderSpec, weights: Weights, ops: Ops, num_positions: int, device: torch.device) -> None:
        self._spec, self._ops = spec, ops
        self.num_layers = len(spec.layers)
        self.kv_width = _heads(spec, weights.group)[1] * spec.head_dim
        tables = {rope: rope_tables(rope, num_positions, device) for rope in {layer.rope for layer in spec.layers}}
        self._layers = weights.layers(self.num_layers, lambda index: _Layer(spec, index, weights, ops, tables))
        self._norm = weights.norm("model.norm.weight", spec.hidden_size, spec.norm_offset)
        self._vocabulary = Vocabulary(
            weights,
            "model.embed_tokens",
            spec.vocab_size,
            spec.hidden_size,
            head=None if spec.tied_head else "lm_head",
        )

    def forward(self, batch: ForwardBatch, pages: KvPages) -> torch.Tensor:
        """Hidden states after the last norm of the tokens `batch.wanted`: [W, hidden]."""
        residual = self._vocabulary.embed(batch.tokens)
        if self._spec.embedding_scale != 1.0:
            # The factor is rounded to the model's dtype first, as in training.
            residual *= torch.tensor(self._spec.embedding_scale, dtype=residual.dtype)
        update: torch.Tensor | None = None  # what the previous layer adds to the residual stream
        last = self.num_layers - 1
        for index, layer in enumerate(self._layers):
            wanted = batch.wanted if index == last else None
            update, residual = layer.forward(update, residual, batch, pages[index], wanted)
        return self._ops.add_rms_norm(update, residual, self._norm, self._spec.norm_eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> [S, vocabulary] on the first rank, None on the others."""
        return self._vocabulary.logits(hidden)


def _heads(spec: DecoderSpec, group: Group) -> tuple[int, int]:
    """The rank's query heads and key-value heads; a key-value head may be on several ranks, each with its queries."""
    heads, kv_heads, world = spec.num_heads, spec.num_kv_heads, group.world
    if heads % world:
        raise ExecutorError(f"tensor_parallel_size: {world} given; it must divide the model's {heads} attention heads")
    if kv_heads % world and world % kv_heads:
        raise ExecutorError(
            f"tensor_parallel_size: {world} given; it must divide the model's {kv_heads} key-value heads, "
            "or be a multiple of them"
        )
    return heads // world, max(1, kv_heads // world)


class _Layer:
    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        weights: Weights,
        ops: Ops,
        tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        dim, prefix = spec.head_dim, f"model.layers.{index}."
        self._spec, self._ops, self._group = spec, ops, weights.group
        self._cos, self._sin = tables[spec.layers[index].rope]
        self._window = spec.layers[index].window
        num_heads, num_kv_heads = _heads(spec, weights.group)
        self._head_split = (num_heads, num_kv_heads, num_kv_heads)

        def norm(name: str, size: int = spec.hidden_size) -> torch.Tensor:
            return weights.norm(f"{prefix}{name}.weight", size, spec.norm_offset)

        self._input_norm = norm("input_layernorm")
        self._q_norm = norm("self_attn.q_norm", dim) if spec.qk_norm else None
        self._k_norm = norm("self_attn.k_norm", dim) if spec.qk_norm else None
        self._attention_norm = norm("post_attention_layernorm") if spec.sandwich_norms else None
        self._mlp_norm = norm("pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm")
        self._output_norm = norm("post_feedforward_layernorm") if spec.sandwich_norms else None
        heads, kv_heads = spec.num_heads * dim, spec.num_kv_heads * dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self._qkv = weights.linear(
            (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
            (heads, kv_heads, kv_heads),
            spec.hidden_size,
            spec.qkv_bias,
            split="rows",
            units=(spec.num_heads, spec.num_kv_heads, spec.num_kv_heads),
        )
        self._output = weights.linear(
            (f"{attention}o_proj",), (spec.hidden_size,), heads, spec.output_bias, split="columns"
        )
        self._gate_up = weights.linear(
            (f"{mlp}gate_proj", f"{mlp}up_proj"),
            (spec.intermediate_size, spec.intermediate_size),
            spec.hidden_size,
            spec.mlp_bias,
            split="rows",
        )
        self._down = weights.linear(
            (f"{mlp}down_proj",), (spec.hidden_size,), spec.intermediate_size, spec.mlp_bias, split="columns"
        )
        self._activate = ops.silu_mul if spec.activation == "silu" else ops.gelu_tanh_mul

    def forward(
        self,
        update: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        pages: tuple[torch.Tensor, torch.Tensor],
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over the residual stream [T, hidden], to which `update` is still to be added.

        Returns this layer's own update and the stream, both cut to the `wanted` tokens if given: what the
        last layer's MLP computes for other tokens nobody reads.
        """
        ops, eps = self._ops, self._spec.norm_eps
        if update is None:
            hidden = ops.rms_norm(residual, self._input_norm, eps)
        else:
            hidden, residual = ops.add_rms_norm(update, residual, self._input_norm, eps)
        attended = self._attend(hidden, batch, pages)
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        update = self._group.sum(self._output(attended))
        if self._attention_norm is not None:
            update = ops.rms_norm(update, self._attention_norm, eps)
        hidden, residual = ops.add_rms_norm(update, residual, self._mlp_norm, eps)
        update = self._group.sum(self._down(self._activate(self._gate_up(hidden))))
        if self._output_norm is not None:
            update = ops.rms_norm(update, self._output_norm, eps)
        return update, residual

    def _attend(
        self, hidden: torch.Tensor, batch: ForwardBatch, pages: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[T, hidden] -> [T, heads * dim]; the new keys and values are in their pages before any is read."""
        heads = self._qkv(hidden).view(hidden.shape[0], -1, self._spec.head_dim)
        q, k, v = torch.split_with_sizes(heads, self._head_split, dim=1)
        k_pages, v_pages = pages
        q = self._ops.rope_and_store(
            q,
            k,
            v,
            self._cos,
            self._sin,
            batch.positions,
            k_pages,
            v_pages,
            batch.kv_slots,
            self._q_norm,
            self._k_norm,
            self._spec.norm_eps,
        )
        return self._ops.paged_attention(q, k_pages, v_pages, batch, self._spec.attention_scale, self._window).flatten(
            1
        )
