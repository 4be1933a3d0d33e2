"""The OPT model: learned positions, LayerNorm before or after, biases everywhere, an ungated ReLU MLP.

Its residual structure differs from the shared decoder's, so it has a file of its own. It is kept because many test
suites and papers use small OPT models.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages, StatePages
from penstock.executor.cache_layout import LayerCache
from penstock.executor.kernels import KeyStore, Ops, Pages, Rotation
from penstock.executor.kernels.linear import Linear
from penstock.executor.loading.fields import Fields
from penstock.executor.models.attention import heads_of
from penstock.executor.models.decoder import Vocabulary
from penstock.executor.models.moe import Experts
from penstock.executor.models.weights import Weights

POSITION_OFFSET = 2  # the first two rows of the position table are for padding
NORM_EPS = 1e-5  # LayerNorm's own default; the config has no field for it


@dataclass(frozen=True, slots=True)
class OptSpec:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_positions: int
    embedding_size: int  # if it differs from hidden_size, there are projections between them
    norm_first: bool
    final_norm: bool
    bias: bool
    tied_head: bool


def read_opt(fields: Fields) -> OptSpec:
    fields.only("activation_function", "relu", default="relu")
    fields.only("layer_norm_elementwise_affine", True, default=True)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
    norm_first = fields.flag("do_layer_norm_before", True)
    return OptSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_positions=fields.integer("max_position_embeddings"),
        embedding_size=fields.integer("word_embed_proj_dim", hidden_size),
        norm_first=norm_first,
        final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
        bias=fields.flag("enable_bias", True),
        tied_head=fields.flag("tie_word_embeddings", True),
    )


class Opt:
    def __init__(self, spec: OptSpec, weights: Weights, ops: Ops, num_positions: int, device: torch.device) -> None:
        self.kv_parts, self.num_layers = 2, spec.num_layers
        self.caches, self.unit_bytes = (LayerCache(),) * spec.num_layers, 0
        self.kv_width = heads_of(spec.num_heads, spec.num_heads, weights.group)[1] * spec.head_dim
        self.experts: list[Experts] = []
        self.adapted: tuple[Linear, ...] = ()
        prefix = "model.decoder."
        name = f"{prefix}embed_tokens"
        self._vocabulary = Vocabulary(weights, name, spec.vocab_size, spec.embedding_size, spec.tied_head)
        positions_shape = (spec.max_positions + POSITION_OFFSET, spec.hidden_size)
        self._positions = weights.tensor(f"{prefix}embed_positions.weight", positions_shape)
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if spec.embedding_size != spec.hidden_size:
            self._project_in = weights.linear((f"{prefix}project_in",), (spec.hidden_size,), spec.embedding_size)
            self._project_out = weights.linear((f"{prefix}project_out",), (spec.embedding_size,), spec.hidden_size)
        no_rotation = torch.empty(num_positions, 0, device=device)
        self._layers = weights.layers(
            spec.num_layers, lambda index: _OptLayer(spec, f"{prefix}layers.{index}.", weights, ops, no_rotation)
        )
        self._norm = _LayerNorm(weights, f"{prefix}final_layer_norm", spec.hidden_size) if spec.final_norm else None

    def forward(self, batch: ForwardBatch, pages: KvPages) -> Tensor:
        """Return the hidden states of the tokens `batch.wanted`, projected for the head: [W, embedding_size]."""
        hidden = self._vocabulary.embed(batch.tokens)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        hidden = hidden + self._positions.index_select(0, batch.positions + POSITION_OFFSET)
        for layer, own in zip(self._layers, pages, strict=True):
            assert not isinstance(own, StatePages)
            hidden = layer.forward(hidden, batch, own)
        if batch.wanted is not None:
            hidden = hidden.index_select(0, batch.wanted)
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._vocabulary.logits(hidden)


class _LayerNorm:
    def __init__(self, weights: Weights, name: str, size: int) -> None:
        self._size = size
        self._weight = weights.tensor(f"{name}.weight", (size,))
        self._bias = weights.tensor(f"{name}.bias", (size,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self._size,), self._weight, self._bias, NORM_EPS)


class _OptLayer:
    def __init__(self, spec: OptSpec, prefix: str, weights: Weights, ops: Ops, no_rotation: Tensor) -> None:
        self._ops, self._no_rotation, self._norm_first = ops, no_rotation, spec.norm_first
        self._head_dim, self._group = spec.head_dim, weights.group
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.bias
        self._attention_norm = _LayerNorm(weights, f"{prefix}self_attn_layer_norm", hidden)
        self._mlp_norm = _LayerNorm(weights, f"{prefix}final_layer_norm", hidden)
        qkv = tuple(f"{prefix}self_attn.{part}_proj" for part in "qkv")
        heads = spec.num_heads
        self._qkv = weights.linear(qkv, (hidden,) * 3, hidden, bias, split="rows", units=(heads,) * 3)
        self._output = weights.linear((f"{prefix}self_attn.out_proj",), (hidden,), hidden, bias, split="columns")
        self._up = weights.linear((f"{prefix}fc1",), (inner,), hidden, bias, split="rows")
        self._down = weights.linear((f"{prefix}fc2",), (hidden,), inner, bias, split="columns")

    def forward(self, hidden: Tensor, batch: ForwardBatch, pages: Pages) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        if self._norm_first:
            hidden = hidden + self._attend(self._attention_norm(hidden), batch, pages)
            return hidden + self._feed(self._mlp_norm(hidden))
        hidden = self._attention_norm(hidden + self._attend(hidden, batch, pages))
        return self._mlp_norm(hidden + self._feed(hidden))

    def _feed(self, hidden: Tensor) -> Tensor:
        return self._group.sum(self._down(self._up(hidden).relu_()))

    def _attend(self, hidden: Tensor, batch: ForwardBatch, pages: Pages) -> Tensor:
        q, k, v = self._qkv(hidden).unflatten(-1, (-1, self._head_dim)).chunk(3, dim=1)
        rotation = Rotation(self._no_rotation, self._no_rotation, batch.positions)
        q = self._ops.rope_and_store(q, k, v, KeyStore(rotation, pages, batch.kv_slots))
        attended = self._ops.paged_attention(q, pages, batch, self._head_dim**-0.5)
        return self._group.sum(self._output(attended.flatten(1)))
