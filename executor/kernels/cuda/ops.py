"""The Triton kernels as `Ops`, `SamplingOps` and `InputOps`, for a model on a GPU."""

import dataclasses

from penstock.executor.kernels import BlockOps, InputOps, Ops, SamplingOps
from penstock.executor.kernels.card import Card
from penstock.executor.kernels.cuda import draw_tokens as sampling
from penstock.executor.kernels.cuda import expanded, fp8, latent_rope, logit_edits, routing, rows
from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import gated_linear as linear
from penstock.executor.kernels.cuda import latent_attention as latent
from penstock.executor.kernels.cuda import paged_attention as attention
from penstock.executor.kernels.cuda import rope_and_store as rope
from penstock.executor.kernels.cuda import step_inputs as inputs

OPS = Ops(
    rows.rms_norm,
    rows.add_rms_norm,
    rope.rope_and_store,
    latent_rope.latent_rope_and_store,
    attention.paged_attention,
    latent.latent_attention,
    rows.silu_mul,
    rows.gelu_tanh_mul,
    routing.choose_experts,
    moe.fused_experts,
    BlockOps(fp8.quantize, fp8.silu_mul_quantize, fp8.add_rms_norm_quantize, fp8.block_linear, moe.fused_block_experts),
    expanded.expanded_attention,
    linear.gated_linear,
)

INPUT_OPS = InputOps(inputs.apply_runs, inputs.prepare)
SAMPLING_OPS = SamplingOps(sampling.choose, logit_edits.penalize, logit_edits.mask)


def choose_ops(card: Card) -> Ops:
    """`OPS`, but for what the card does not have."""
    return OPS if card.has_eight_bits else dataclasses.replace(OPS, blocks=None)
