"""What distinguishes one decoder-only model from another: a family turns its config.json into this, `Decoder` runs it."""

from dataclasses import dataclass, replace

from penstock.executor.kernels import Activation
from penstock.executor.loading.arrangement import AS_LLAMA, Arrangement
from penstock.executor.models.rope import Rope
from penstock.executor.moe_spec import MoeSpec


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention. A cached position is `rope_dim + kv_rank` wide."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int  # of a query head's part without rotation
    rope_dim: int
    value_dim: int

    def is_expanded(self, count: int) -> bool:
        """Whether a chunk of `count` tokens takes less arithmetic if the latents of all it sees are expanded.

        Multiplications per head and position it sees: each of its tokens meets a key and a value, made of the latent
        for all of them, or the latent itself twice.
        """
        expanded = count * (self.nope_dim + self.rope_dim + self.value_dim)
        expansion = (self.nope_dim + self.value_dim) * self.kv_rank
        absorbed = count * (2 * self.kv_rank + self.rope_dim)
        return expanded + expansion < absorbed


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Heads of the gated delta rule, each with a state [key_dim, value_dim], behind a convolution of so many taps."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_grouped: bool  # the projections have what belongs to one key head side by side


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba 2, named as the delta rule's heads are: B are keys, C queries, x values."""

    key_heads: int  # groups, over each of which there is one norm
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    conv_bias: bool
    bias: bool
    norm_eps: float  # the config's own, whatever becomes of the stream's


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A short convolution between two gates, over all channels of the stream."""

    taps: int
    bias: bool


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of one layer, if they are not the model's. Their values are normalized. Pages are as wide as the widest
    layer's keys; narrower layers use their beginning."""

    dim: int
    num_kv: int
    pages: int  # the layer whose pages it uses: its own, or those of an earlier layer
    reads_only: bool = False  # it has no keys and values of its own
    has_values: bool = True  # else the keys, before norm and rotation, are the values


@dataclass(frozen=True, slots=True)
class LayerSpec:
    rope: Rope
    window: int | None = None  # attend to this many positions, the own one included; None: to all
    moe: MoeSpec | None = None  # instead of the dense MLP
    recurrent: DeltaSpec | MambaSpec | ConvSpec | None = None  # instead of attention
    heads: LayerHeads | None = None  # None: the model's
    mlp_size: int | None = None  # None: the model's


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
    output_gate: bool = False  # what attention gives is multiplied by a sigmoid; the query projection has the gate too
    is_qk_norm_wide: bool = False  # over all heads together, not over each
    rotates_first: bool = False  # queries and keys are normalized behind the rotation
    # Gemma: norms also after attention and MLP, stored as the distance from one, and scaled embeddings.
    sandwich_norms: bool = False
    has_pre_norms: bool = True  # OLMo 2 has only those after
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    rounds_scale: bool = True  # `embedding_scale` to the model's dtype, as in Gemma's training
    logit_scale: float = 1.0
    # Queries grow by 1 + this * log(1 + length) for as many whole lengths (the second) as lie before them.
    query_growth: tuple[float, int] | None = None
    arrangement: Arrangement = AS_LLAMA
    has_sinks: bool = False
    # A score of attention, or a logit, x becomes cap * tanh(x / cap).
    score_cap: float | None = None
    logit_cap: float | None = None
    # The width of what each layer adds to the stream at its end, made from a token's number and its embedding. 0: the layers
    # only scale the stream there. None: they do neither.
    input_width: int | None = None
    input_vocab_size: int = 0
    latent: LatentSpec | None = None  # then head_dim is the width of a cached position, shared by all heads

    def heads_of(self, index: int) -> LayerHeads:
        """Return the heads of the layer at this index: its own, or the model's."""
        return self.layers[index].heads or LayerHeads(self.head_dim, self.num_kv_heads, index)

    def for_positions(self, count: int) -> "DecoderSpec":
        """Of a model that is to compute so many."""
        layers = (replace(layer, rope=layer.rope.for_positions(count)) for layer in self.layers)
        return replace(self, layers=tuple(layers))
