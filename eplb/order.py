"""Sorting rows of float32 values in one order everywhere, whatever the processor's vector width.

numpy's fastest sorts are not stable: equal loads come out in another order with AVX-512 than with AVX2, and ranks
that plan for themselves would then disagree. So value and column are packed into one integer, no two of which are
equal: the value as float64 leaves 29 bits free, the column lies in them, and the order of the integers is the order
of the values. Everything in this room that sorts by load calls one of these.

Where a near tie may go either way, the column lies in the low bits of the float32 itself: that is half as much to
sort, and no two values that differ by more than columns · 2^-23 of themselves change places.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float32]
Ids = NDArray[np.int16]  # of experts
Indices = NDArray[np.int64]

_COLUMN = np.int64((1 << 29) - 1)  # float32 needs 23 of float64's 52 bits of mantissa


def descending(values: Shares) -> Indices:
    """Columns of every row from the largest value to the smallest; the lower column first among equals."""
    keys = _falling(values)
    keys.sort(axis=1)
    keys &= _COLUMN
    return keys


def largest(values: Shares, count: int) -> Indices:
    """The columns of every row's `count` largest values, in no order; the lower columns among equals."""
    keys = _falling(values)
    keys.partition(count - 1, axis=1)
    return keys[:, :count] & _COLUMN


def roughly_ascending(values: Shares) -> NDArray[np.int32]:
    """Columns of every row from the smallest value to the largest, but for near ties, of values that are not negative."""
    columns, low = _low_bits(values.shape[1])
    keys = values.view(np.int32) & ~low
    keys |= columns
    keys.sort(axis=1)
    keys &= low
    return keys


@cache
def _low_bits(num_columns: int) -> tuple[NDArray[np.int32], np.int32]:
    """Every column, and the bits that it takes."""
    return np.arange(num_columns, dtype=np.int32), np.int32((1 << (num_columns - 1).bit_length()) - 1)


def _falling(values: Shares) -> Indices:
    """Keys that fall where non-negative values rise: the value's bits are turned over, the column's are not."""
    keys = values.astype(np.float64).view(np.int64)
    keys ^= np.arange(values.shape[1]) ^ ~_COLUMN
    return keys
