"""`GroupOps` in plain torch, as this module is one: the oracle of the Triton kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Activation, Packed
from penstock.executor.kernels.grouped import unpack
from tests.support.twins.experts import fused_experts


def packed_linear(x: Tensor, weight: Packed) -> Tensor:
    return F.linear(x, widen(weight).to(x.dtype))


def packed_experts(
    hidden: Tensor,
    slots: Tensor,
    shares: Tensor,
    gate_up: Packed,
    down: Packed,
    first: int,
    activation: Activation,
    added: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    up, narrow = ((widen(weight).to(hidden.dtype), None) for weight in (gate_up, down))
    return fused_experts(hidden, slots, shares, up, narrow, first, activation, added, biases)


def widen(weight: Packed) -> Tensor:
    """Numbers [..., N, K] in the order of the inputs, float32."""
    if weight.codes.dim() == 3:
        return torch.stack([widen(weight.like(parts)) for parts in zip(*weight.tensors(), strict=True)])
    numbers = unpack(weight)
    return numbers if weight.order is None else torch.empty_like(numbers).index_copy_(1, weight.order.long(), numbers)
