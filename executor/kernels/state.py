"""What a GPU remembers of the requests in its slots, in one flat tensor: tokens, block tables, how each one samples.

The host only says what changes. Changes are *runs*, neighbouring numbers and where they go, and all that a step brings,
of whatever kind, goes over in the step's one copy (executor/step/inputs.py) and is put into place by one kernel.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.executor.protocol import Sampling

HEADER = 4  # numbers of a step's block before the rows' own; the first says how many rows there are
OPTIONS = 8  # numbers per slot: temperature, min_p, top_p as bits, top_k, the seed's halves; two are spare
MAX_RUN = 1 << 16  # longer runs are cut, so that each fits into a copy


class Places(NamedTuple):
    """Where things lie in the flat tensor; kernels are given it."""

    width: int  # of a slot's tokens, the first of which is at slot * width
    blocks_at: int
    max_blocks: int  # of a slot
    options_at: int
    spare: int  # a number that is never read: padding writes its tokens there
    block_size: int


class DeviceState:
    def __init__(self, num_slots: int, width: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        blocks_at = (num_slots + 1) * width  # of the last slot's tokens only the first is used: the spare one
        options_at = blocks_at + num_slots * max_blocks
        size = options_at + num_slots * OPTIONS
        assert size < 2**31, "kernels count in 32 bits"
        self.places = Places(width, blocks_at, max_blocks, options_at, num_slots * width, block_size)
        self.flat = torch.zeros(size, dtype=torch.int32, device=device)
        self._runs: list[tuple[int, np.ndarray]] = []

    @property
    def tokens(self) -> Tensor:
        """[slots + 1, width]"""
        return self.flat[: self.places.blocks_at].view(-1, self.places.width)

    def write_tokens(self, slot: int, first: int, tokens: np.ndarray) -> None:
        self._write(slot * self.places.width + first, tokens)

    def write_blocks(self, slot: int, first: int, blocks: Iterable[int]) -> None:
        self._write(self.places.blocks_at + slot * self.places.max_blocks + first, np.fromiter(blocks, dtype=np.int32))

    def write_options(self, slot: int, sampling: Sampling) -> None:
        floats = np.array([sampling.temperature, sampling.min_p, sampling.top_p], dtype=np.float32)
        seed = np.array([sampling.seed], dtype=np.uint64)
        numbers = np.concatenate([floats.view(np.int32), np.array([sampling.top_k], np.int32), seed.view(np.int32)])
        self._write(self.places.options_at + slot * OPTIONS, numbers)

    def take(self) -> list[tuple[int, np.ndarray]]:
        """The runs since the last call. They go into place all at once, so no two may touch the same number."""
        taken, self._runs = self._runs, []
        return taken

    def _write(self, at: int, numbers: np.ndarray) -> None:
        for first in range(0, len(numbers), MAX_RUN):
            self._runs.append((at + first, numbers[first : first + MAX_RUN]))
