"""Matrix products with weights: the fastest form that the device offers, chosen once, when the weight arrives."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer [T, in] -> [T, out] from weight [out, in] and bias [out]; on the CPU `weight` may go then."""
    if is_repacked(weight):
        from penstock.executor.kernels.cpu_linear import CpuLinear

        return CpuLinear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def is_repacked(weight: torch.Tensor) -> bool:
    """Whether the layer keeps a copy in a layout of its own, and `weight` is no longer needed for it."""
    if weight.device.type != "cpu":
        return False
    from penstock.executor.kernels.cpu_linear import supports

    return supports(weight)
