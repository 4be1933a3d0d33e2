"""Grammar masks on logits: what a row may not sample becomes minus infinity, in place."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.kernels import SamplingOps
from penstock.executor.staging import send, send_list

MINUS_INFINITY = {torch.float32: 0xFF800000, torch.bfloat16: 0xFF80, torch.float16: 0xFC00}  # as bits
PART_BYTES = 32 << 20  # of unpacked bits on a GPU at a time: one byte for each


class RowMasks(NamedTuple):
    """rows: indices into the logits' rows; masks [n, words] int32 on the host, one bit per token."""

    rows: list[int]
    masks: np.ndarray

    def apply(self, logits: Tensor, ops: SamplingOps | None = None) -> None:
        """logits [S, V]"""
        if not self.rows:
            return
        if ops is not None:
            ops.mask(logits, send_list(self.rows, torch.int64, logits.device), send(self.masks, logits.device))
            return
        if logits.device.type == "cpu":
            self._apply_on_cpu(logits)
            return
        packed = send(self.masks.view(np.uint8), logits.device)
        index = send_list(self.rows, torch.int64, logits.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        vocab_size = logits.shape[1]
        step = max(1, PART_BYTES // vocab_size)
        for first in range(0, len(self.rows), step):
            part, rows = packed[first : first + step], index[first : first + step]
            banned = (part[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] == 0  # [n, V]
            logits.index_copy_(0, rows, logits[rows].masked_fill_(banned, -torch.inf))

    def _apply_on_cpu(self, logits: Tensor) -> None:
        """10 to 15 µs for a row of 49,152 in bfloat16; numpy's unpackbits with torch's masked_fill_ took 75."""
        assert logits.stride(1) == 1 and self.masks.flags["C_CONTIGUOUS"]
        rows = np.array(self.rows, dtype=np.int64)
        _csrc.lib.penstock_mask(
            logits.data_ptr(),
            logits.stride(0),
            logits.element_size(),
            MINUS_INFINITY[logits.dtype],
            rows.ctypes.data,
            self.masks.ctypes.data,
            *self.masks.shape,
            logits.shape[1],
        )
