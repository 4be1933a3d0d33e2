"""Chooses the kernels for a device: C for a CPU, Triton for a GPU.

Triton is only installed on machines with a GPU, so its kernels are imported only when a GPU is chosen.
"""

from types import ModuleType

import torch

from penstock.executor.kernels import InputOps, Ops, SamplingOps
from penstock.executor.kernels.card import Card, card_of
from penstock.executor.kernels.cpu_ops import make_ops
from penstock.executor.protocol import ExecutorError


def select_ops(device: torch.device, dtype: torch.dtype, head_dim: int, is_invariant: bool = False) -> Ops:
    """Return the kernels for a model of this kind; with `is_invariant`, those whose sums do not depend on the batch."""
    if device.type == "cpu":
        return make_ops(dtype, head_dim)
    ops: Ops = cuda_kernels().choose_ops(check_card(device), is_invariant)
    return ops


def select_sampling_ops(device: torch.device) -> SamplingOps | None:
    """Return the kernels that sample on a GPU. None on a CPU, where the sampler has its own."""
    return None if device.type == "cpu" else cuda_kernels().SAMPLING_OPS


def select_input_ops(device: torch.device) -> InputOps | None:
    """Return the kernels that compute a step's inputs on a GPU. None on a CPU, where numpy computes them."""
    return None if device.type == "cpu" else cuda_kernels().step_inputs


def cuda_kernels() -> ModuleType:
    """Import the kernels in Triton."""
    from penstock.executor.kernels.cuda import ops

    return ops


def check_card(device: torch.device) -> Card:
    """Return the GPU's properties. Raise ExecutorError if it is too old for the kernels."""
    card = card_of(torch.cuda.current_device() if device.index is None else device.index)
    if card.capability < (8, 0):
        raise ExecutorError(
            f"device: this GPU has compute capability {'.'.join(map(str, card.capability))}; 8.0 (Ampere) or later is "
            "needed. Use device 'cpu' on this machine"
        )
    return card
