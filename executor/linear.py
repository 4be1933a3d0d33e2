"""Matrix products with weights: the fastest form that the device offers, chosen once, when the weight arrives.

On the CPU that is a weight reordered for oneDNN ahead of time. `F.linear` would reorder bf16 weights on every
call (2-3 times slower at one row) and goes to MKL for float32, which is slower here and whose rows change in
the last bits with the number of rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]

# oneDNN may pick another layout for one row than for many; eight gives the blocked layout that serves both.
PACK_ROWS = 8
# oneDNN splits a longer inner dimension when there is a single row, and so sums it in another order than the same
# row among others (3.12, AVX-512; the only such case found in any shape, row count and thread count tried).
SINGLE_ROW_INNER = 1024


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer [T, in] -> [T, out] from weight [out, in] and bias [out]."""
    if can_pack(weight):
        return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch has the (private) oneDNN operators for this device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and cpu_has_bfloat16())


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 here, with instructions for it."""
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        # As the first of two rows a row gets the bits it gets in any batch, and the second row is almost free.
        self._pads_single_row = weight.shape[1] > SINGLE_ROW_INNER

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._pads_single_row and x.shape[0] == 1:
            return self._run(x.expand(2, -1), self._weight, self._bias, "none", [], "")[:1]
        return self._run(x, self._weight, self._bias, "none", [], "")


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)
