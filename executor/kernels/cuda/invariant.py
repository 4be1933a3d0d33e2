"""The kernels of `CudaOps` with a fixed order of every sum, independent of the batch, for `batch_invariant`."""

from functools import partial

from torch import Tensor

from penstock.executor.kernels import Activation, GroupOps, NormingOps
from penstock.executor.kernels.cuda import (
    convolution,
    delta_rule,
    expert_products,
    fixed_attention,
    fixed_product,
    fp8,
    packed_products,
    rows,
)
from penstock.executor.kernels.cuda.ops import CudaOps
from penstock.executor.kernels.recurrent import RecurrentOps


class _FixedGroups:
    packed_linear = staticmethod(partial(packed_products.packed_linear, is_fixed=True))
    packed_experts = staticmethod(partial(packed_products.packed_experts, is_fixed=True))


class _FixedBlocks:
    quantize = staticmethod(fp8.quantize)
    silu_mul_quantize = staticmethod(fp8.silu_mul_quantize)
    add_rms_norm_quantize = staticmethod(fp8.add_rms_norm_quantize)
    block_linear = staticmethod(partial(fp8.block_linear, is_fixed=True))


class _FixedRecurrent:
    convolve = staticmethod(convolution.convolve)
    delta_rule = staticmethod(partial(delta_rule.delta_rule, is_fixed=True))


class InvariantOps(CudaOps):
    """Operations that are not overridden here already work row by row in `CudaOps`."""

    norming: NormingOps | None = None
    linear = staticmethod(fixed_product.linear)
    paged_attention = staticmethod(fixed_attention.paged_attention)
    fused_experts = staticmethod(partial(expert_products.fused_experts, is_fixed=True))
    groups: GroupOps | None = _FixedGroups()
    recurrent: RecurrentOps = _FixedRecurrent()

    def __init__(self, has_eight_bits: bool) -> None:
        super().__init__(_FixedBlocks() if has_eight_bits else None)

    @staticmethod
    def gated_linear(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        return rows.gate(fixed_product.linear(x, weight), activation)
