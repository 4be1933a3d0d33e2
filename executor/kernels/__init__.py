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
    """What some models do with the scores of attention after they are scaled."""

    cap: float | None = None  # then a score is cap * tanh(score / cap)
    sinks: Tensor | None = None  # [Hq] float32: a further score of each head, which has no value
    window: int | None = None  # then only the last `window` positions have a score


NO_EXTRAS = ScoreExtras()


class Rotation(NamedTuple):
    """The rotation of `rot` numbers of each head; 0: none."""

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
    """Rows for a product that computes rms_norm(update + residual) itself, and writes the sum to `total`."""

    update: Tensor  # [T, H]
    residual: Tensor
    total: Tensor
    weight: Tensor  # [H] float32
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        return self.update.dtype


class Ops(Protocol):
    """The operations of a model. Norm weights are float32 whatever the dtype of x; q, k and v may be views of one tensor."""

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
        """Attention over expanded latents; None if there is only `latent_attention`."""

    @property
    def fused_experts(self) -> "FusedExperts | None":
        """The experts of a layer in one call; None: they are computed one by one."""

    @property
    def recurrent(self) -> RecurrentOps:
        """The operations of layers that keep a state instead of keys and values."""

    @property
    def norming(self) -> "NormingOps | None":
        """Products that norm their rows; None if every product reads rows that are already normed."""

    @property
    def groups(self) -> "GroupOps | None":
        """Products with codes of four or eight bits; None: such weights are dequantized, or C computes them."""

    @property
    def blocks(self) -> "BlockOps | None":
        """Weights and pages of eight bits; None: such weights are dequantized when they are loaded."""


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
    """The experts of a layer in one call. Weights are stacked: numbers, `Blocks` or `Mxfp4`; for `GroupOps` they are `Packed`
    and have no biases."""

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
        """Return the weighted sum of the experts in slots first … first + S - 1, plus `added`: hidden [T, H], slots
        and shares [T, k], gate_up [S, 2 I, H], down [S, H, I] -> [T, H]. An entry of another rank's slot adds nothing.
        Biases are those of the two products, [S, 2 I] and [S, H]."""


class NormingOps(Protocol):
    """Products of few rows that add and norm the rows as well."""

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
    """Products with weights that are dequantized as they are read. Inputs and sums are as with numbers."""

    def packed_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, K] -> [T, N]"""

    @property
    def packed_experts(self) -> FusedExperts: ...


class SamplingOps(Protocol):
    """Sampling on a GPU. The CPU samples from the same distributions in a faster way (executor/sampling/draw.py).

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
        """Set the logits that rows [n] of logits [S, V] may not sample to minus infinity, in place: masks [n, words] int32,
        a bit for each token."""


class RowTensors(NamedTuple):
    """The tensors that a GPU makes of a step's rows: T tokens, R rows."""

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
        """Return what `SamplingOps.choose` takes after the logits."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.context_lens.long()


class InputOps(Protocol):
    """The kernels that make a step's inputs on the device.

    The packed numbers, for R rows: how many of them are real, three spare ones, R + 1 starts of the rows' tokens, then R
    each of slots, first positions and `write_from`. What lies where in the state: executor/kernels/state.py.
    """

    def apply_runs(self, packed: Tensor, state: Tensor, first: int, num_runs: int, longest: int) -> None:
        """Copy runs into the state: `num_runs` triples from packed[first] on, of place in the state, place in `packed`, length."""

    def prepare(
        self, packed: Tensor, state: Tensor, places: Places, rows: int, tokens: int, longest: int, table_width: int
    ) -> RowTensors:
        """Return the tensors of a step; `longest` is the most tokens of a row. Padding rows get zeros and a spare target."""
