"""The interfaces of the kernels that models are built from, implemented in C for CPUs and in Triton for CUDA.

A model receives an `Ops` when it is built; apart from it, a model uses only plain tensor operations.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs
from penstock.executor.kernels.state import StateLayout
from penstock.executor.kernels.weight import Weight
from penstock.executor.moe_spec import MoeSpec

# clamped_swish is gpt-oss's: swish with slope 1.702 of the gate, clamped to at most 7, times (up, clamped to ±7) + 1.
# relu and relu2, which squares the result, are those of MLPs without a gate.
Activation = Literal["silu", "gelu_tanh", "clamped_swish", "relu", "relu2"]
UNGATED: tuple[Activation, ...] = ("relu", "relu2")
# x [T, K] as float8_e4m3fn [T, K], and a float32 scale for every 128 numbers of a row, [T, K / 128]
Quantized = tuple[Tensor, Tensor]
FIXED_ON = "8.x, 9.0 or 12.x"  # on these capabilities, tensor cores use the same instruction for small and large tiles
Pages = tuple[Tensor, Tensor]  # keys and values of one layer, each [pages, PAGE, Hkv * D]
HeadNorms = tuple[Tensor | None, Tensor | None, float]  # weights [D] for query heads and for key heads, and eps
NO_NORMS: HeadNorms = (None, None, 0.0)
ExpandedAttention = Callable[[Tensor, Tensor, Tensor, ForwardBatch, int, float, int], Tensor]
IN_PROMPT = 1 << 30  # flag in a token's count: the prompt has it


class ScoreExtras(NamedTuple):
    """Model-specific changes to the attention scores after scaling."""

    cap: float | None = None  # if set, a score becomes cap * tanh(score / cap)
    sinks: Tensor | None = None  # [Hq] float32: an additional score per head, without a value
    window: int | None = None  # if set, a token attends only to the last `window` positions


NO_EXTRAS = ScoreExtras()


class Rotation(NamedTuple):
    """Rotary position embedding of the first `rot` numbers of each head; rot = 0 disables it."""

    cos: Tensor  # [P, rot / 2] float32
    sin: Tensor
    positions: Tensor  # [T] int32: each token's row in the tables


class KeyStore(NamedTuple):
    """The rotation and norms of queries and keys, and the pages and cells that keys and values are written to."""

    rotation: Rotation
    pages: Pages
    kv_cells: Tensor
    norms: HeadNorms = NO_NORMS


class LatentStore(NamedTuple):
    """The norm and rotation that turn latents into keys, and the pages and cells that the keys are written to."""

    norm: tuple[Tensor, float]  # weight [rank], and eps
    rotation: Rotation
    pages: Tensor
    kv_cells: Tensor


class NormedRows(NamedTuple):
    """Inputs of a product that computes rms_norm(update + residual) itself and writes the sum to `total`."""

    update: Tensor  # [T, H]
    residual: Tensor
    total: Tensor
    weight: Tensor  # [H] float32
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        return self.update.dtype


class Fp8Rows(NamedTuple):
    """FP8 inputs of products that all use FP8; the previous kernel quantized them when it wrote them."""

    rows: Quantized
    dtype: torch.dtype  # the dtype before quantization, and that of the products' outputs


Rows = Tensor | Fp8Rows | NormedRows  # the possible inputs of a layer's first products


class Ops(Protocol):
    """The operations of a model. Norm weights are always float32; q, k and v may be views of one tensor."""

    max_normed_rows: int  # the most `NormedRows` that products take; 0: products need inputs that are already normed
    max_plain_rows: int  # the most rows that products with `Blocks` take unquantized
    # If True, products take `Packed` and `Mxfp4` weights and dequantize them as they read them; else such weights are
    # dequantized at load time, or computed in C.
    has_packed: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]"""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)"""

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [T, 2 I], the gate first -> activation(gate) * up [T, I]"""

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, W], gate [T, W] -> x * sigmoid(gate)"""

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, K], weight [N, K], bias [N] -> [T, N]. A weight of `Blocks` takes `Fp8Rows`, and up to
        `max_plain_rows` tensors; the others take tensors. All take up to `max_normed_rows` of `NormedRows`."""

    def gated_linear(self, x: Tensor | NormedRows, weight: Weight, activation: Activation) -> Tensor:
        """x [T, K], weight [2 I, K], the gate's rows first -> [T, I]: `linear` followed by `gate`"""

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor | None, store: KeyStore) -> Tensor:
        """Normalize q [T, Hq, D] and k [T, Hkv, D] per head if norm weights are given, rotate them, and write k and v
        to the pages; return q. If v is None, only k is written."""

    def latent_rope_and_store(
        self, goal: Tensor, q: Tensor, down: Tensor, store: LatentStore, first: int, is_whole: bool
    ) -> None:
        """Normalize the latents and rotate keys and queries of tokens first … first + t - 1 of q [T, H, nope + rope]
        and down [T, rank + rope], the outputs of the checkpoint's projections. Write the keys to the pages and the
        rotated queries to the first `rope` numbers of goal [t, H, rope + …]; with `is_whole`, also their nope part."""

    def paged_attention(
        self, q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
    ) -> Tensor:
        """Causal attention of every token over its row's pages [pages, PAGE, Hkv * D], q [T, Hq, D] -> [T, Hq, D]."""

    def latent_attention(self, q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
        """q [T, H, rope + rank], latents [pages, PAGE, rope + rank] -> [T, H, rank]: attention with one key-value head
        whose keys are the latents and whose values are the latents without their first `rope` numbers."""

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, moe: MoeSpec, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        """logits [T, experts] float32 -> each token's experts [T, k] int32 and their routing weights [T, k] float32.

        If the shared experts have a gate, its logit is the last one. With `num_shared`, that many shared experts are
        appended to each token's choice, numbered from `num_experts` on, with the gate's weight, or 1 without a gate.
        """

    # Recurrent layers read each row's state from, and write it to, the pages in the batch's `StateBatch`. Unit 0 of a
    # layer holds the last inputs of its convolution, and each further unit one head's S.

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: StatePages, batch: ForwardBatch, has_silu: bool
    ) -> Tensor:
        """Convolve each channel with its weights: x [T, C], weight [taps, C] and bias [C] float32 -> [T, C]. The state
        keeps the last taps - 1 inputs, in the dtype of x."""

    def delta_rule(self, inputs: DeltaInputs, heads: DeltaHeads, states: StatePages, batch: ForwardBatch) -> Tensor:
        """Apply the gated delta rule -> [T, values], with q and k normalized and q scaled by key_dim^-1/2:

        S = e^(rate softplus(a + shift)) S, S = S + k (sigmoid(b) (v - k S)), rms_norm(q S) * silu(z)

        where S [key_dim, value_dim] is float32. For Mamba 2, with unchanged q and k:

        S = e^(rate softplus(a + shift)) S + k (softplus(a + shift) v), (q S + skip v) * silu(z)"""

    @property
    def expanded_attention(self) -> ExpandedAttention | None:
        """(q, latents, expand, batch, first_row, scale, rope_dim): causal attention of the batch's rows from `first_row`
        on, T tokens in all, over the keys and values that `expand` makes of the latents: q [T, H, rope + nope], expand
        [H, nope + value, rank] -> [T, H, value]. None: there is only `latent_attention`."""

    @property
    def wide_linear(self) -> Callable[..., Tensor] | None:
        """x [T, K], weight [N, K], both of 16 bits, bias [N] float32 -> [T, N] float32, without rounding a product. None:
        `linear` computes it in float32."""

    @property
    def fused_experts(self) -> Callable[..., Tensor] | None:
        """(hidden, expert_slots, shares, gate_up, down, first, activation, added, biases): the weighted sum of the experts
        in the slots first … first + S - 1, plus `added`, in one call: hidden [T, H], expert_slots and shares [T, k], gate_up
        [S, 2 I, H], down [S, H, I] -> [T, H]. Entries with slots of other ranks are skipped. The stacked weights are
        `Numbers`, `Blocks`, `Packed` or `Mxfp4`; `biases` are those of the two products, [S, 2 I] and [S, H], or None.
        Without a gate (`UNGATED`), 2 I is I. None: the experts are computed one by one."""

    @property
    def blocks(self) -> "BlockOps | None":
        """Quantizes the inputs of products with `Blocks`; None: such weights are dequantized at load time, and there
        are no FP8 pages."""


class BlockOps(Protocol):
    """Quantizes inputs of products with FP8 weights that have one scale per block of 128 × 128 (`Blocks`)."""

    def quantize(self, x: Tensor) -> Quantized:
        """x [T, K] -> FP8 values with a scale per 128 numbers; K is a multiple of 128."""

    def silu_mul_quantize(self, gate_up: Tensor) -> Quantized:
        """`quantize` of `gate`"""

    def add_rms_norm_quantize(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Quantized, Tensor]:
        """(`quantize` of rms_norm(x + residual), x + residual)"""


class SamplingOps(Protocol):
    """Sampling. The kernels of a GPU use the Gumbel-max trick: they choose the token whose logit plus noise is largest.
    The noise depends only on seed, position and token, so a request samples the same tokens in any batch, without a sum
    over all logits. On a CPU, executor/sampling/draw.py samples from the same distributions in a faster way.
    """

    def choose(self, logits: Tensor, /, *options: Tensor) -> tuple[Tensor, Tensor]:
        """logits [R, V] -> tokens [R] int64 and the largest logits [R] float32, NaN for a row with a NaN in it.

        The options, [R] each, are temperature and min_p float32, top_k int32, top_p float32, seeds int64 (64 bits) and
        positions int64, in this order. A temperature of 0 chooses the largest logit. The filters min_p, top_k and top_p
        apply one after the other, each to the tokens that the previous one kept; 0, 0 and 1 disable them, and tokens
        that tie with the last one kept are kept too. If the largest logit is not finite, the token is 0.
        """

    def penalize(self, logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, coefficients: Tensor) -> None:
        """Penalize rows [P] of logits [R, at least V] in place, for earlier tokens of the requests in slots [P].

        counts [slots, V] int32: how often each token was sampled, with the bit IN_PROMPT set if the prompt contains
        it. coefficients [P, 3] float32: the repetition, frequency and presence penalties.
        """

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits that the masks forbid to minus infinity, in place, in rows [n] of logits [S, V]. masks
        [n, words] int32 has a bit for each token, which is set if the token is allowed."""


class RowTensors(NamedTuple):
    """The inputs of a step with T tokens and R rows, computed on the GPU."""

    tokens: Tensor  # the first five fields are as in ForwardBatch
    positions: Tensor
    kv_cells: Tensor
    context_lens: Tensor
    block_tables: Tensor
    targets: Tensor  # [R] int64: index in the device state where the token sampled in the row is stored
    temperature: Tensor  # this and the rest: [R], arguments of `SamplingOps.choose`
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Tensor

    def draw(self) -> tuple[Tensor, ...]:
        """Return the arguments of `SamplingOps.choose` after the logits."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.context_lens.long()


class InputOps(Protocol):
    """The kernels that compute a step's inputs on the device, and that copy its blocks from and to host memory.

    executor/kernels/state.py defines the state, and the layout of `packed` (`PackedStep`).
    """

    def apply_runs(self, packed: Tensor, state: Tensor, first: int, num_runs: int, longest: int) -> None:
        """Copy `num_runs` runs from `packed` to `state`; packed[first] on: (at in state, at in packed, length) each."""

    def prepare(
        self, packed: Tensor, state: Tensor, layout: StateLayout, rows: int, tokens: int, longest: int, table_width: int
    ) -> RowTensors:
        """Return a step's inputs; `longest` is the largest row's length. Padding rows get zeros and a spare target."""

    def copy_blocks(self, source: Tensor, target: Tensor, pairs: Tensor) -> None:
        """Copy block pairs[i, 0] of source to pairs[i, 1] of target, uint8 [blocks, bytes]. One may be pinned memory."""
