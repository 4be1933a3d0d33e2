"""`Ops.fused_experts` in plain torch: the oracle of the Triton kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.eight_bits import are_quantized
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight
from tests.support.eight_bits import dequantize
from tests.support.twins import grouped, torch_ops
from tests.support.twins.eight_bits import quantize, widen_rows


def fused_experts(
    hidden: Tensor,
    expert_slots: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    first: int,
    activation: Activation,
    added: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Compute `Experts` in one function. With weights of eight bits, the inputs of the products are quantized if experts
    have many entries."""
    dtype = hidden.dtype
    is_quantized = gate_up.format is down.format is BLOCKS and are_quantized(expert_slots.numel(), len(down.codes))
    up, narrow = (_values(weight, torch.float32 if is_quantized else dtype) for weight in (gate_up, down))
    # In float32 but for what is rounded to eight bits.
    rows = hidden.float() if is_quantized else hidden

    added_up, added_down = ([None] * len(narrow) if bias is None else bias.to(rows.dtype) for bias in biases)

    def through(rows: Tensor) -> Tensor:
        return widen_rows(quantize(rows.to(dtype))) if is_quantized else rows

    both = torch.zeros((*expert_slots.shape, up.shape[1]), dtype=rows.dtype, device=rows.device)
    out = torch.zeros((*expert_slots.shape, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    chosen = [(expert_slots == first + index).nonzero(as_tuple=True) for index in range(len(narrow))]
    for index, (token, choice) in enumerate(chosen):
        both[token, choice] = F.linear(through(rows[token]), up[index], added_up[index])
    if activation == "relu2":
        inside = both.relu().square()
    else:
        inside = torch_ops.gate(both.flatten(0, 1), activation).unflatten(0, expert_slots.shape)
    for index, (token, choice) in enumerate(chosen):
        out[token, choice] = F.linear(through(inside[token, choice]), narrow[index], added_down[index])
    total = (out * shares[..., None]).sum(1)
    return (total if added is None else total + added).to(dtype)


def _values(weight: Weight, dtype: torch.dtype) -> Tensor:
    if weight.format is BLOCKS:
        assert weight.scales is not None
        return torch.stack([dequantize(*block) for block in zip(weight.codes, weight.scales, strict=True)]).to(dtype)
    return weight.codes if weight.is_numbers else grouped.widen(weight).to(dtype)
