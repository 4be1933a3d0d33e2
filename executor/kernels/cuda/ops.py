"""The Triton kernels as `Ops`, for a model on a GPU."""

from penstock.executor.kernels import Ops
from penstock.executor.kernels.cuda import attention, rope, rows

OPS = Ops(
    rows.rms_norm,
    rows.add_rms_norm,
    rope.rope_and_store,
    attention.paged_attention,
    rows.silu_mul,
    rows.gelu_tanh_mul,
)
