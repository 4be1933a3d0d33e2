"""Properties and capabilities of a GPU. Only this module knows which of our kernels need which capability.

GPUs before compute capability 8.0 are refused. On cards that lack a newer capability, kernels use smaller tiles and FP8
weights are dequantized; the rest of the model keeps its kernels.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Card:
    capability: tuple[int, int]
    num_processors: int
    shared_bytes: int  # maximum shared memory of a thread block

    @property
    def has_eight_bits(self) -> bool:
        """Tell whether float8_e4m3fn works in registers, for FP8 weights and pages."""
        return self.capability >= (8, 9)

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_wide_products(self) -> bool:
        """Tell whether matrix products read shared memory (9.0), and write to tensor memory (10.0). On other cards the
        factors pass through registers, so a tile may have only half as many rows."""
        return self.capability[0] in (9, 10)

    @property
    def has_scaled_mm(self) -> bool:
        """Tell whether cuBLAS has block-scaled FP8 products. It refuses them on other cards and before CUDA 12.9, and
        some versions of torch lack the function; then our own kernel multiplies."""
        return self.capability[0] == 9 and hasattr(F, "scaled_mm") and _cuda_version() >= (12, 9)

    @property
    def has_grouped_mm(self) -> bool:
        """Tell whether torch's grouped products read their offsets on the GPU. On other cards the host waits for the
        offsets, which a CUDA graph cannot contain."""
        return self.capability[0] in (9, 10) and hasattr(F, "grouped_mm")


_WITHOUT_GPU = Card((9, 0), 132, 227 << 10)  # an H200


def _cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for. A CPU build counts as the newest, because kernels are only
    interpreted there, or compiled for another machine."""
    return tuple(map(int, (torch.version.cuda or "99").split(".")[:2]))


@cache
def card_of(index: int) -> Card:
    properties = torch.cuda.get_device_properties(index)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # absent from torch's stubs
    return Card((properties.major, properties.minor), properties.multi_processor_count, shared_bytes)


def current_card() -> Card:
    """Return the card that kernels are launched on. Without one, kernels are interpreted or compiled for another
    machine: for an H200, or the card that a test sets."""
    return card_of(torch.cuda.current_device()) if torch.cuda.is_initialized() else _WITHOUT_GPU
