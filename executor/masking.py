"""Grammar masks on logits: what a row may not sample becomes minus infinity, in place."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 32 << 20  # of unpacked bits on a GPU at a time: one byte for each


class RowMasks(NamedTuple):
    """rows: indices into the logits' rows; masks [n, words] int32 on the host, one bit per token."""

    rows: list[int]
    masks: np.ndarray

    def apply(self, logits: Tensor) -> None:
        """logits [S, V]"""
        if not self.rows:
            return
        if logits.device.type == "cpu":
            self._apply_on_cpu(logits)
            return
        # Pinned, so that the copy need not wait for the device, and a copy, so that the masks' owner need not either.
        packed = torch.from_numpy(self.masks.view(np.uint8)).pin_memory().to(logits.device, non_blocking=True)
        index = torch.tensor(self.rows, dtype=torch.int64).pin_memory().to(logits.device, non_blocking=True)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        vocab_size = logits.shape[1]
        step = max(1, PART_BYTES // vocab_size)
        for first in range(0, len(self.rows), step):
            part, rows = packed[first : first + step], index[first : first + step]
            banned = (part[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] == 0  # [n, V]
            logits.index_copy_(0, rows, logits[rows].masked_fill_(banned, -torch.inf))

    def _apply_on_cpu(self, logits: Tensor) -> None:
        """Row by row, which stays in the cache: 20 to 30 µs for 49,152 tokens."""
        words = self.masks.view(np.uint8)
        for row, packed in zip(self.rows, ~words, strict=True):
            banned = np.unpackbits(packed, count=logits.shape[1], bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(banned.view(bool)), -torch.inf)
