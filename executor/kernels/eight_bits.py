"""FP8 activations for products with weights of `Blocks` (weight.py), and the layout of scales for cuBLAS.

Activations are quantized to float8_e4m3fn at run time, with one float32 scale per token and 128 numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.stored_formats import BLOCK

FP8_MAX = 448.0  # the largest finite float8_e4m3fn
TINY = 1e-10  # the largest magnitude assumed for a block of zeros, to avoid a scale of 0

FEW_ENTRIES = 16  # tokens per expert, up to which weights are not multiplied in FP8
ROW_MULTIPLE = 4  # cuBLAS needs scales padded to a multiple of this many rows


def make_quantized(rows: int, width: int, device: torch.device) -> Quantized:
    """Allocate rows and their column-major scales, both padded to a multiple of four rows; return unpadded views."""
    assert width % BLOCK == 0
    padded = _padded(rows)
    values = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((width // BLOCK, padded), dtype=torch.float32, device=device).t()
    return values[:rows], scales[:rows]


def pad_rows(x: Quantized) -> Quantized:
    """Return the rows with their padding, which is uninitialized: the products' rows for it are never read."""
    (values, scales), rows = x, _padded(len(x[0]))
    assert values.is_contiguous() and scales.stride() == (1, rows), "rows that `make_quantized` has not made"
    values, scales = (each.as_strided((rows, each.shape[1]), each.stride()) for each in x)
    return values, scales


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def are_quantized(entries: int, num_slots: int) -> bool:
    """Tell whether experts multiply in FP8. With few tokens per expert they are memory-bound, so FP8 gains nothing."""
    return entries > FEW_ENTRIES * num_slots


def pad_scales(scales: Tensor) -> Tensor:
    """Pad the scales of a weight [N / 128, K / 128] along K to a multiple of four, the layout that cuBLAS reads."""
    return F.pad(scales.float(), (0, -scales.shape[1] % 4))
