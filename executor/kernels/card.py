"""What a GPU is and can do: the one place that knows which of our kernels need what.

GPUs before compute capability 8.0 are refused. What a newer card lacks is left out: a kernel takes a smaller tile, weights
of eight bits are dequantized, and the rest of the model keeps its kernels.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Card:
    capability: tuple[int, int]
    num_processors: int
    shared_bytes: int  # of shared memory, that one block of threads may have

    @property
    def has_eight_bits(self) -> bool:
        """float8_e4m3fn in registers: weights and pages of eight bits."""
        return self.capability >= (8, 9)

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_wide_products(self) -> bool:
        """Out of shared memory (9.0) and into a memory of their own (10.0). Elsewhere the factors of a product pass through
        registers, and a tile may have half as many rows before these run out."""
        return self.capability[0] in (9, 10)

    @property
    def has_scaled_mm(self) -> bool:
        """cuBLAS's product of eight bits with a scale per block. cuBLAS refuses it on other cards and has it from CUDA
        12.9 on, and some versions of torch lack the function; elsewhere our own kernel multiplies."""
        return self.capability[0] == 9 and hasattr(F, "scaled_mm") and _cuda_version() >= (12, 9)


_WITHOUT_GPU = Card((9, 0), 132, 227 << 10)  # an H200


def _cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for. A torch for CPUs stands for the newest: kernels are only
    interpreted there, or compiled for another machine."""
    return tuple(map(int, (torch.version.cuda or "99").split(".")[:2]))


@cache
def card_of(index: int) -> Card:
    properties = torch.cuda.get_device_properties(index)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # absent from torch's stubs
    return Card((properties.major, properties.minor), properties.multi_processor_count, shared_bytes)


def current_card() -> Card:
    """Of the device that kernels are launched on. Where there is none they are interpreted, or compiled for another
    machine: as for an H200, or the card that a test names."""
    return card_of(torch.cuda.current_device()) if torch.cuda.is_initialized() else _WITHOUT_GPU
