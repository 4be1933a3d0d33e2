"""Random weights that need no file: equal for the same seed on every device, and fast to generate.

All tensors are filled from one buffer of pseudo-random normal numbers. Each starts at another offset and wraps around;
the length is prime, so no two rows of a matrix are equal. The speed is limited by memory, not by a random generator
(0.6 B weights in well under a second). Scales keep activations near one at any depth.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels.stored_formats import BLOCK
from penstock.executor.kernels.weight import EIGHT_BITS
from penstock.executor.loading.quantization import SUFFIX

# Not embeddings, heads, norms, routers, and the few rows of the gates of recurrent layers.
PROJECTIONS = tuple(f"_proj{end}.weight" for end in ("", "_with_mqa", "_qkv", "_qkvz", "_z"))
PERIOD = 1_048_573  # the largest prime below 2**20


class DummyWeights:
    """Generates a tensor for a name and a shape, on the CPU in `dtype`. With `has_blocks`, projections are FP8 with
    scales, as in a block-quantized checkpoint."""

    def __init__(self, seed: int, dtype: torch.dtype, has_blocks: bool = False) -> None:
        self._seed, self._dtype, self._has_blocks = seed, dtype, has_blocks
        noise = np.random.Generator(np.random.Philox(seed)).standard_normal(PERIOD, dtype=np.float32)
        self._noise = torch.from_numpy(noise)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(SUFFIX):
            return torch.full(shape, (shape[1] * BLOCK) ** -0.5)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        noise = self._noise.roll(-(int.from_bytes(digest[:8], "little") % PERIOD))
        if self._has_blocks and name.endswith(PROJECTIONS):
            return _repeat_noise(noise.to(EIGHT_BITS).view(torch.uint8), shape).view(EIGHT_BITS)
        if len(shape) > 1:
            noise = noise * shape[-1] ** -0.5
        elif name.endswith("weight"):
            noise = 1 + 0.1 * noise  # a norm
        else:
            noise = 0.1 * noise
        return _repeat_noise(noise.to(self._dtype), shape)


def _repeat_noise(period: Tensor, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape, dtype=period.dtype)
    flat = out.view(-1)
    whole = flat.numel() // PERIOD
    flat[: whole * PERIOD].view(whole, PERIOD).copy_(period.expand(whole, PERIOD))
    flat[whole * PERIOD :].copy_(period[: flat.numel() - whole * PERIOD])
    return out
