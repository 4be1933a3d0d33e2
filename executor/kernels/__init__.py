"""The operations a model is built from, behind one set of signatures: C for CPU, Triton for CUDA.

A model receives an `Ops` when it is built and calls nothing else that is not a plain tensor operation.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.recurrent import RecurrentOps
from penstock.executor.kernels.state import Places
from penstock.executor.kernels.weight import Weight
from penstock.executor.moe_spec import MoeSpec

# The last is that of gpt-oss: swish of slope 1.702 of a gate up to 7, times one more than an `up` from -7 to 7.
Activation = Literal["silu", "gelu_tanh", "clamped_swish"]
# x [T, K] as float8_e4m3fn [T, K], and a float32 scale for every 128 numbers of a row, [T, K / 128]
Quantized = tuple[Tensor, Tensor]
FIXED_ON = "8.x, 9.0 or 12.x"  # whose tensor cores have one instruction for tiles of few rows and of many
Pages = tuple[Tensor, Tensor]  # of one layer: keys and values, each [pages, PAGE, Hkv * D]
HeadNorms = tuple[Tensor | None, Tensor | None, float]  # weights [D] for query heads and for key heads, and eps
NO_NORMS: HeadNorms = (None, None, 0.0)


class ScoreExtras(NamedTuple):
    """What some models do with the scores of attention, scaled as they are."""

    cap: float | None = None  # then a score is cap * tanh(score / cap)
    sinks: Tensor | None = None  # [Hq] float32: a further score of each head, which has no value
    window: int | None = None  # then only the last `window` positions have a score


NO_EXTRAS = ScoreExtras()


class Rotation(NamedTuple):
    """rot numbers of each head are rotated; 0: none."""

    cos: Tensor  # [P, rot / 2] float32
    sin: Tensor
    positions: Tensor  # [T] int32: each token's row in the tables


class KeyStore(NamedTuple):
    """How queries and keys are rotated, and where keys and values go."""

    rotation: Rotation
    pages: Pages
    kv_slots: Tensor
    norms: HeadNorms = NO_NORMS


class LatentStore(NamedTuple):
    """How latents become keys, and where these go."""

    norm: tuple[Tensor, float]  # weight [rank], and eps
    rotation: Rotation
    pages: Tensor
    kv_slots: Tensor


class NormedRows(NamedTuple):
    """Rows on their way into a product that computes their sum and norm itself: rms_norm(update + residual). It writes the
    sum to `total`."""

    update: Tensor  # [T, H]
    residual: Tensor
    total: Tensor
    weight: Tensor  # [H] float32
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        return self.update.dtype


class Ops(Protocol):
    """Norm weights are float32 whatever the dtype of x. q, k and v may be views of one merged projection."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]"""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)"""

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [T, 2 I], the gate first -> activation(gate) * up [T, I]"""

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, W] times the sigmoid of gate [T, W]"""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K], weight [N, K], bias [N] -> [T, N]"""

    def gated_linear(self, x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        """x [T, K], weight [2 I, K], the gate's rows first -> [T, I]: a product, and `gate`"""

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor | None, store: KeyStore) -> Tensor:
        """Normalize q [T, Hq, D] and k [T, Hkv, D] per head if weights are given, rotate them, write k and v into their
        pages; returns q. v = None: k is all there is to store."""

    def latent_rope_and_store(
        self, goal: Tensor, q: Tensor, down: Tensor, store: LatentStore, first: int, is_whole: bool
    ) -> None:
        """For tokens first … first + t - 1 of q [T, H, nope + rope] and down [T, rank + rope], as a checkpoint's
        projections make them: normalize the latents, rotate keys and queries. Keys go into the pages, queries to the
        beginnings of goal [t, H, rope + …], whole ones with nope behind them."""

    def paged_attention(
        self, q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
    ) -> Tensor:
        """Causal attention of every token over its row's pages [pages, PAGE, Hkv * D], q [T, Hq, D] -> [T, Hq, D]."""

    def latent_attention(self, q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
        """q [T, H, rope + rank], latents [pages, PAGE, rope + rank] -> [T, H, rank]: as with one key-value head whose keys
        and values are the same vectors, of which the first `rope` numbers are no values."""

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, moe: MoeSpec, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        """logits [T, experts] float32 -> the experts of each token [T, k] int32, and their shares [T, k] float32.

        Where shared experts have a gate, its logit stands behind the others. `num_shared`: behind a token's choice come
        so many more numbers, from `num_experts` on, which have the gate's share, or all of it.
        """

    @property
    def expanded_attention(self) -> "ExpandedAttention | None":
        """None: there is only `latent_attention`."""

    @property
    def fused_experts(self) -> "FusedExperts | None":
        """None: expert after expert."""

    @property
    def recurrent(self) -> RecurrentOps:
        """Of layers that carry a state along instead of keys and values."""

    @property
    def norming(self) -> "NormingOps | None":
        """None where every product reads rows that are already normed."""

    @property
    def groups(self) -> "GroupOps | None":
        """Weights as codes of four or eight bits; None: they are numbers of the model's dtype, or C's (`codes`)."""

    @property
    def blocks(self) -> "BlockOps | None":
        """Weights and pages of eight bits; None: such weights become numbers of the model's dtype when they are loaded."""


class ExpandedAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        latents: Tensor,
        expand: Tensor,
        batch: ForwardBatch,
        first_row: int,
        scale: float,
        rope_dim: int,
    ) -> Tensor:
        """Causal attention of the batch's rows from the first on, T tokens in all, over the keys and values that each head
        has of the latents: q [T, H, rope + nope], expand [H, nope + value, rank] -> [T, H, value]."""


class FusedExperts(Protocol):
    """Weights are stacked: numbers, `Blocks` or `Mxfp4`, or for `GroupOps` `Packed` ones, which have no biases."""

    def __call__(
        self,
        hidden: Tensor,
        slots: Tensor,
        shares: Tensor,
        gate_up: Weight,
        down: Weight,
        first: int,
        activation: Activation,
        added: Tensor | None = None,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """What the experts in slots first … first + S - 1 add up to, each by its share, and `added`: hidden [T, H], slots
        and shares [T, k], gate_up [S, 2 I, H], down [S, H, I] -> [T, H]. An entry of another rank's slot adds nothing.
        Biases are those of the two products, [S, 2 I] and [S, H]."""


class NormingOps(Protocol):
    """Products of few rows, which add and norm them as well."""

    MAX_ROWS: int

    def linear(self, x: NormedRows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`Ops.linear` of the normed rows."""

    def gated_linear(self, x: NormedRows, weight: Tensor, activation: Activation) -> Tensor:
        """`Ops.gated_linear` of the normed rows."""


class BlockOps(Protocol):
    """Products with weights of eight bits that have a scale per 128 × 128 (`Blocks`)."""

    def quantize(self, x: Tensor) -> Quantized:
        """K is a multiple of 128."""

    def silu_mul_quantize(self, gate_up: Tensor) -> Quantized:
        """`quantize` of `gate`"""

    def add_rms_norm_quantize(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Quantized, Tensor]:
        """(`quantize` of rms_norm(x + residual), x + residual)"""

    def block_linear(self, x: Quantized, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, K] by weight [N, K] with scales [N / 128 rounded up, at least K / 128] -> [T, N]"""


class GroupOps(Protocol):
    """Products with weights that are widened as they are read. Inputs and sums are as with numbers."""

    def packed_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, K] -> [T, N]"""

    @property
    def packed_experts(self) -> FusedExperts: ...


class SamplingOps(Protocol):
    """What a GPU samples with; the CPU has a faster way of its own to the same distributions (executor/sampling/draw.py).

    A GPU draws by the Gumbel-max trick: the token whose logit plus noise is largest. Noise is a function of seed, position
    and token alone, so a request gives the same tokens in any batch, and no sum over the vocabulary is needed.
    """

    def choose(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """logits [R, V] -> tokens [R] int64 and the largest logits [R] float32, NaN for a row with a NaN in it.

        Options are [R]: temperature, min_p and top_p float32, top_k int32, seeds int64 (64 bits), positions int64. A
        temperature of 0 takes the largest logit. Filters go in this order, each by what the one before it left: weights
        of at least min_p, the top_k largest, the largest that reach top_p of the sum; 0, 0 and 1 switch them off, and a
        tie with the last token kept is kept. Where the largest logit is not finite the token is 0.
        """

    def penalize(
        self, logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, in_prompt: int, coefficients: Tensor
    ) -> None:
        """Penalize rows [P] of logits [R, at least V] in place, for what the requests in slots [P] have seen.

        counts [slots, V] int32: how often a token was sampled, and the bit `in_prompt` if the prompt has it. The
        coefficients [P, 3], float32, are those of repetition, frequency and presence.
        """

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Minus infinity, in place, for what rows [n] of logits [S, V] may not sample: masks [n, words] int32, a bit
        each."""


class RowTensors(NamedTuple):
    """What a GPU makes of a step's rows: T tokens, R rows."""

    tokens: Tensor  # the first five are as in ForwardBatch
    positions: Tensor
    kv_slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    targets: Tensor  # [R] int64 into the state: where a token sampled in the row goes
    temperature: Tensor  # [R], like the rest, as `SamplingOps.choose` takes them
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Tensor

    def draw(self) -> tuple[Tensor, ...]:
        """What `SamplingOps.choose` takes behind the logits."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.context_lens.long()


class InputOps(Protocol):
    """What makes a step's inputs on the device.

    The block's numbers, for R rows: how many of them are real, three spare ones, R + 1 starts of the rows' tokens, then R
    each of slots, first positions and `write_from`. What lies where in the state: executor/kernels/state.py.
    """

    def apply_runs(self, packed: Tensor, state: Tensor, first: int, num_runs: int, longest: int) -> None:
        """`num_runs` triples from packed[first] on: where a run goes in the state, where it is in `packed`, how long."""

    def prepare(
        self, packed: Tensor, state: Tensor, places: Places, rows: int, tokens: int, longest: int, table_width: int
    ) -> RowTensors:
        """`longest`: the most tokens of a row. Rows that are not real get zeros, and the spare place for their token."""
