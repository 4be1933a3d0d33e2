"""Activations of eight bits on their way into products with weights of `Blocks` (weight.py), and scales for cuBLAS.

They are float8_e4m3fn, quantized on the way, with one float32 scale per token and 128 numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.weight import BLOCK

FP8_MAX = 448.0  # the largest finite float8_e4m3fn
TINY = 1e-10  # a block of zeros has this largest magnitude

FEW_ENTRIES = 16  # of an expert
ROW_MULTIPLE = 4  # of rows, for cuBLAS to take their scales


def make_quantized(rows: int, width: int, device: torch.device) -> Quantized:
    """Return room for rows and their scales, which lie column by column; both are padded to a multiple of four rows."""
    assert width % BLOCK == 0
    padded = _padded(rows)
    values = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((width // BLOCK, padded), dtype=torch.float32, device=device).t()
    return values[:rows], scales[:rows]


def pad_rows(x: Quantized) -> Quantized:
    """Return the rows with their padding, which nobody has written; its rows of the products are never read."""
    (values, scales), rows = x, _padded(len(x[0]))
    assert values.is_contiguous() and scales.stride() == (1, rows), "rows that `make_quantized` has not made"
    return values.as_strided((rows, values.shape[1]), values.stride()), scales.as_strided(
        (rows, scales.shape[1]), scales.stride()
    )


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def are_quantized(entries: int, num_slots: int) -> bool:
    """Tell whether experts multiply in eight bits: with few entries each they only wait for their weights."""
    return entries > FEW_ENTRIES * num_slots


def pad_scales(scales: Tensor) -> Tensor:
    """Pad the scales of a weight [N / 128, K / 128] along K to a multiple of four, the layout that cuBLAS reads."""
    return F.pad(scales.float(), (0, -scales.shape[1] % 4))
