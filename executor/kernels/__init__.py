"""The operations a model is built from, behind one set of signatures: plain torch, C for CPU, Triton for CUDA.

A model receives an `Ops` when it is built and calls nothing else that is not a plain tensor operation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.executor.kernels.card import Card, card_of


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Products with weights of eight bits that have a scale per block, described at the twins in `torch_fp8`."""

    # (x [T, K]) -> eight bits [T, K] and scales [T, K / 128]
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # (gate_up [T, 2 K]) -> as `quantize` of silu_mul
    silu_mul_quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # (x, residual, weight, eps) -> as `quantize` of rms_norm(x + residual), and x + residual
    add_rms_norm_quantize: Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]
    # (quantized x, weight [N, K], its scales, dtype) -> [T, N]
    block_linear: Callable[..., torch.Tensor]
    # As `Ops.fused_experts`, with the scales [S, …] after each weight. None: expert after expert.
    fused_experts: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Ops:
    """Norm weights are float32 whatever the dtype of x. q, k and v may be views of one merged projection."""

    # (x [T, H], weight [H], eps) -> y [T, H]
    rms_norm: Callable[..., torch.Tensor]
    # (x, residual, weight, eps) -> (rms_norm(x + residual), x + residual)
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (q [T, Hq, D], k [T, Hkv, D], v, cos [P, rot / 2] float32, sin, positions [T], k_pages, v_pages, kv_slots [T],
    #  q_weight=None, k_weight=None, eps=0.0) -> q [T, Hq, D]; k and v go into the pages. rot = 0: no rotation;
    #  v = None: k is all there is to store.
    rope_and_store: Callable[..., torch.Tensor]
    # For tokens first … first + t - 1 of (q [T, H, nope + rope], down [T, rank + rope], as a checkpoint's projections
    # make them): (goal [t, H, rope + …], q, down, weight [rank], eps, cos, sin, positions, latents, kv_slots, first,
    # is_whole); rotated queries go to the beginnings of goal (whole ones: nope behind them), keys into the pages
    latent_rope_and_store: Callable[..., None]
    # (q [T, Hq, D], k_pages [pages, PAGE, Hkv * D], v_pages, batch, scale, window=None) -> [T, Hq, D]
    paged_attention: Callable[..., torch.Tensor]
    # (q [T, H, rope + rank], latents [pages, PAGE, rope + rank], batch, scale, rope) -> [T, H, rank]: as with one
    # key-value head whose keys and values are the same vectors, of which the first `rope` numbers are no values
    latent_attention: Callable[..., torch.Tensor]
    # (gate_up [T, 2 I]) -> activation(gate) * up [T, I]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    # (logits [T, experts] float32, bias [experts] or None, MoeSpec, num_shared=0) -> experts [T, k] int32, shares [T, k]
    choose_experts: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (hidden [T, H], slots [T, k], shares [T, k], gate_up [S, 2 I, H], down [S, H, I], first slot, activation,
    #  added [T, H] = None) -> [T, H]; None: expert after expert
    fused_experts: Callable[..., torch.Tensor] | None = None
    # Weights and pages of eight bits; None: such weights become numbers of the model's dtype when they are loaded.
    blocks: BlockOps | None = None
    # (q [T, H, rope + nope], latents, expand [H, nope + value, rank], batch, first row, scale, rope) -> [T, H, value]:
    # attention of the batch's rows from the first on, T tokens in all, over the keys and values that each head has of
    # the latents. None: there is only `latent_attention`.
    expanded_attention: Callable[..., torch.Tensor] | None = None
    # (x [T, K], weight [2 I, K], activation) -> [T, I], as one product and `silu_mul` or `gelu_tanh_mul`; None: as these
    gated_linear: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """What a GPU samples with, described at the twins in `torch_sampling`. The CPU has other ways (executor/sampling/draw.py)."""

    # (logits [R, V], temperature [R], min_p, top_k, top_p, seeds, positions) -> tokens [R], largest logits [R]
    choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (logits, rows [P], slots [P], counts, in_prompt, coefficients [P, 3]), in place
    penalize: Callable[..., None]
    # (logits [S, V], rows [n], masks [n, words]), in place
    mask: Callable[..., None]


class RowTensors(NamedTuple):
    """What a GPU makes of a step's rows: T tokens, R rows."""

    tokens: torch.Tensor  # the first five are as in ForwardBatch
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    targets: torch.Tensor  # [R] int64 into the state: where a token sampled in the row goes
    temperature: torch.Tensor  # [R], like the rest, as `SamplingOps.choose` takes them
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor

    def draw(self) -> tuple[torch.Tensor, ...]:
        """What `SamplingOps.choose` takes behind the logits."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.context_lens.long()


@dataclass(frozen=True, slots=True)
class InputOps:
    """What makes a step's inputs on the device, described at the twins in `torch_inputs`."""

    # (packed, state, first, number of runs, longest run), in place
    apply_runs: Callable[..., None]
    # (packed, state, places, rows, tokens, most tokens of a row, width of the block tables)
    prepare: Callable[..., RowTensors]


def select_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    """The fastest set there is for a model of this kind."""
    if device.type == "cpu":
        from penstock.executor.kernels.cpu_ops import make_ops

        return make_ops(dtype, head_dim)
    if _has_triton_kernels(device):
        from penstock.executor.kernels.cuda.ops import choose_ops

        return choose_ops(_card(device))
    from penstock.executor.kernels import torch_ops

    return torch_ops.OPS


def select_sampling_ops(device: torch.device) -> SamplingOps | None:
    """None where the sampler does with plain torch."""
    if not _has_triton_kernels(device):
        return None
    from penstock.executor.kernels.cuda.ops import SAMPLING_OPS

    return SAMPLING_OPS


def select_input_ops(device: torch.device) -> InputOps:
    if _has_triton_kernels(device):
        from penstock.executor.kernels.cuda.ops import INPUT_OPS

        return INPUT_OPS
    from penstock.executor.kernels import torch_inputs

    return torch_inputs.INPUT_OPS


def _has_triton_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _card(device).has_kernels


def _card(device: torch.device) -> Card:
    return card_of(torch.cuda.current_device() if device.index is None else device.index)
