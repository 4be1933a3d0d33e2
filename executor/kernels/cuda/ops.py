"""The Triton kernels as `Ops`, `BlockOps` and `SamplingOps`, for a model on a GPU."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from penstock.executor.kernels import FIXED_ON, BlockOps, Ops
from penstock.executor.kernels.card import Card
from penstock.executor.kernels.cuda import (
    adapter_products,
    attention_ops,
    convolution,
    delta_rule,
    draw_tokens,
    expanded,
    expert_products,
    few_rows,
    latent_rope,
    linear_products,
    logit_edits,
    rope_and_store,
    routing,
    rows,
    step_inputs,
)
from penstock.executor.protocol import ExecutorError

__all__ = ["OPS", "SAMPLING_OPS", "CudaOps", "InvariantOps", "adapter_products", "choose_ops", "step_inputs"]


class CudaOps:
    has_packed = True
    max_normed_rows, max_plain_rows = few_rows.MAX_ROWS, linear_products.MAX_PLAIN_ROWS
    linear: Callable[..., Tensor] = staticmethod(linear_products.linear)
    wide_linear: Callable[..., Tensor] = staticmethod(linear_products.wide_linear)
    rms_norm = staticmethod(rows.rms_norm)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    gate = staticmethod(rows.gate)
    gated_linear: Callable[..., Tensor] = staticmethod(linear_products.gated_linear)
    rope_and_store = staticmethod(rope_and_store.rope_and_store)
    latent_rope_and_store = staticmethod(latent_rope.latent_rope_and_store)
    paged_attention = staticmethod(attention_ops.paged_attention)
    latent_attention = staticmethod(attention_ops.latent_attention)
    choose_experts = staticmethod(routing.choose_experts)
    convolve = staticmethod(convolution.convolve)
    delta_rule: Callable[..., Tensor] = staticmethod(delta_rule.delta_rule)
    expanded_attention = staticmethod(expanded.expanded_attention)
    fused_experts = staticmethod(expert_products.fused_experts)

    def __init__(self, blocks: BlockOps | None) -> None:
        self.blocks = blocks

    @staticmethod
    def apply_gate(x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class CudaSampling:
    choose = staticmethod(draw_tokens.choose)
    penalize = staticmethod(logit_edits.penalize)
    mask = staticmethod(logit_edits.mask)


class InvariantOps(CudaOps):
    """Kernels with a fixed order of every sum, independent of the batch, for `batch_invariant`. Operations that are not
    overridden here already work row by row in `CudaOps`."""

    max_normed_rows = max_plain_rows = 0
    linear = staticmethod(partial(linear_products.linear, is_fixed=True))
    wide_linear = staticmethod(partial(linear_products.wide_linear, is_fixed=True))
    paged_attention = staticmethod(partial(attention_ops.paged_attention, is_fixed=True))
    fused_experts = staticmethod(partial(expert_products.fused_experts, is_fixed=True))
    delta_rule = staticmethod(partial(delta_rule.delta_rule, is_fixed=True))
    gated_linear = staticmethod(partial(linear_products.gated_linear, is_fixed=True))


OPS, SAMPLING_OPS = CudaOps(rows), CudaSampling()


def choose_ops(card: Card, is_invariant: bool) -> Ops:
    """Return `OPS`, without the kernels that the card does not support, or the batch-invariant operations."""
    if is_invariant:
        if card.capability[0] not in (8, 9, 12):
            raise ExecutorError(
                f"batch_invariant: given; it needs a GPU of compute capability {FIXED_ON}, and this one is of "
                f"{'.'.join(map(str, card.capability))}"
            )
        return InvariantOps(rows if card.has_eight_bits else None)
    return OPS if card.has_eight_bits else CudaOps(blocks=None)
