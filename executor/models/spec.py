"""What tells one decoder-only model from another: a family turns its config.json into this, `Decoder` runs it."""

from dataclasses import dataclass
from typing import Literal

from penstock.executor.models.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerSpec:
    rope: Rope
    window: int | None = None  # attend to this many positions, the own one included; None: to all


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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Gemma: norms also after attention and MLP, stored as the distance from one, and scaled embeddings.
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
