"""The settings of a decoder-only model: families.py makes them from config.json, `Decoder` runs them."""

from dataclasses import dataclass, replace

from penstock.executor.kernels import Activation
from penstock.executor.loading.arrangement import AS_LLAMA, Arrangement
from penstock.executor.models.rope import Rope
from penstock.executor.moe_spec import MoeSpec

PADDING_ROWS = 2  # the first rows of a table of learned positions are for padding


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention. A cached position is `rope_dim + kv_rank` wide."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int  # size of the part of a query head that is not rotated
    rope_dim: int
    value_dim: int

    def is_expanded(self, count: int) -> bool:
        """Return whether a chunk of `count` tokens takes less arithmetic with the latents of its context expanded.

        The comparison counts multiplications per head and position of the context: each token multiplies with a key and
        a value, which are expanded once for all tokens, or twice with the latent itself.
        """
        expanded = count * (self.nope_dim + self.rope_dim + self.value_dim)
        expansion = (self.nope_dim + self.value_dim) * self.kv_rank
        absorbed = count * (2 * self.kv_rank + self.rope_dim)
        return expanded + expansion < absorbed


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Heads of the gated delta rule, each with a state [key_dim, value_dim], after a convolution with `taps` taps."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_grouped: bool  # the rows of the projections are grouped by key head


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba 2 in the delta rule's terms: B are keys, C are queries, x are values."""

    key_heads: int  # number of groups; each group has one norm
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    conv_bias: bool
    bias: bool
    norm_eps: float  # the config's eps, even if that of the stream's norms is scaled


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A short convolution between two gates, over all channels of the stream."""

    taps: int
    bias: bool


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Layer-specific heads, whose values are normalized. Pages are as wide as the widest layer's keys; narrower layers
    use the first numbers of each position."""

    dim: int
    num_kv: int
    pages: int  # the layer whose pages it uses: its own, or those of an earlier layer
    reads_only: bool = False  # the layer has no keys and values of its own
    has_values: bool = True  # if False, the keys before norm and rotation are also the values


@dataclass(frozen=True, slots=True)
class LayerSpec:
    rope: Rope
    window: int | None = None  # number of positions attended to, the token's own included; None: all
    moe: MoeSpec | None = None  # experts instead of the dense MLP, or in addition to it (`is_beside`)
    recurrent: DeltaSpec | MambaSpec | ConvSpec | None = None  # instead of attention
    heads: LayerHeads | None = None  # None: the model's
    mlp_size: int | None = None  # None: the model's
    has_mlp: bool = True  # if False, the layer is only attention or a recurrent layer


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    attention_scale: float
    tied_head: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False  # attention's output is multiplied by sigmoid(gate), part of the query projection
    is_qk_norm_wide: bool = False  # queries and keys are normalized over all heads together, not per head
    rotates_first: bool = False  # queries and keys are normalized after the rotation
    # Gemma: norms also after attention and MLP, norm weights stored minus one, and scaled embeddings.
    sandwich_norms: bool = False
    has_pre_norms: bool = True  # OLMo 2 has norms only after attention and MLP
    # OPT: LayerNorms, which may replace the residual stream, and learned positions.
    has_layer_norms: bool = False
    norms_stream: bool = False
    num_learned_positions: int = 0  # rows of the table of position embeddings, with PADDING_ROWS
    embedding_size: int | None = None  # if set, token embeddings are projected to hidden_size, and back for the head
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    rounds_scale: bool = True  # round `embedding_scale` to the model's dtype, as in Gemma's training
    logit_scale: float = 1.0
    # (slope, length): the query at position p is multiplied by 1 + slope * log(1 + p // length).
    query_growth: tuple[float, int] | None = None
    arrangement: Arrangement = AS_LLAMA
    has_sinks: bool = False
    # With a cap, an attention score or a logit x becomes cap * tanh(x / cap).
    score_cap: float | None = None
    logit_cap: float | None = None
    # The width of the per-layer embeddings that each layer adds at its end, from token id and embedding. 0: the layers
    # only scale the stream at their end. None: they do neither.
    input_width: int | None = None
    input_vocab_size: int = 0
    latent: LatentSpec | None = None  # if set, head_dim is the width of a cached position, shared by all heads
    has_draft_layer: bool = False  # the last of `layers` only drafts tokens (draft_layer.py)

    def heads_of(self, index: int) -> LayerHeads:
        """Return the heads of the layer at this index: its own, or the model's."""
        return self.layers[index].heads or LayerHeads(self.head_dim, self.num_kv_heads, index)

    def for_positions(self, count: int) -> "DecoderSpec":
        """Return the spec for a maximum of `count` positions."""
        layers = (replace(layer, rope=layer.rope.for_positions(count)) for layer in self.layers)
        return replace(self, layers=tuple(layers))
