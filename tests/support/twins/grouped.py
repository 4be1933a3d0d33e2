"""`GroupOps` in plain torch, as this module is one: the oracle of the Triton kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.weight import Weight, numbers
from tests.support.twins.experts import fused_experts


def packed_linear(x: Tensor, weight: Weight) -> Tensor:
    return F.linear(x, widen(weight).to(x.dtype))


def packed_experts(
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
    up, narrow = (numbers(widen(weight).to(hidden.dtype)) for weight in (gate_up, down))
    return fused_experts(hidden, slots, shares, up, narrow, first, activation, added, biases)


def widen(weight: Weight) -> Tensor:
    """Return numbers [..., N, K] in the order of the inputs, float32."""
    if weight.codes.dim() == 3:
        return torch.stack([widen(weight.like(parts)) for parts in zip(*weight.tensors(), strict=True)])
    order = None if weight.order is None else weight.order.long()
    return weight._replace(order=order).dequantize(weight.codes.device, torch.float32)
