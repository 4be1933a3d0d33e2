"""Sorting of float32 rows in one order on every machine, independent of the processor's vector width.

numpy's fastest sorts are not stable: equal loads come out in a different order with AVX-512 than with AVX2, and ranks
that plan independently would disagree. Therefore the value and its column are packed into one unique integer: the value
as float64 leaves 29 bits free for the column, and the integers sort like the values. Everything in this room that sorts
by load calls one of these functions.

`roughly_ascending` puts the column into the low bits of the float32 itself: it sorts half as many bytes, and swaps only
values that differ by a fraction of less than columns · 2^-23.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float32]
Ids = NDArray[np.int16]  # of experts
Indices = NDArray[np.int64]

_COLUMN = np.int64((1 << 29) - 1)  # float32 needs only 23 of float64's 52 mantissa bits


def descending(values: Shares) -> Indices:
    """Return the columns of every row from the largest value to the smallest; ties put the lower column first."""
    keys = _falling(values)
    keys.sort(axis=1)
    keys &= _COLUMN
    return keys


def largest(values: Shares, count: int) -> Indices:
    """Return the columns of the `count` largest values of every row, unordered; ties prefer the lower column."""
    keys = _falling(values)
    keys.partition(count - 1, axis=1)
    return keys[:, :count] & _COLUMN


def roughly_ascending(values: Shares) -> NDArray[np.int32]:
    """Return the columns of every row of non-negative values in ascending order, except that near ties may swap."""
    columns, low = _low_bits(values.shape[1])
    keys = values.view(np.int32) & ~low
    keys |= columns
    keys.sort(axis=1)
    keys &= low
    return keys


@cache
def _low_bits(num_columns: int) -> tuple[NDArray[np.int32], np.int32]:
    """Return the column numbers and the mask of the bits that hold them."""
    return np.arange(num_columns, dtype=np.int32), np.int32((1 << (num_columns - 1).bit_length()) - 1)


def _falling(values: Shares) -> Indices:
    """Return unique keys that sort in descending order of the non-negative values: the value bits are inverted."""
    keys = values.astype(np.float64).view(np.int64)
    keys ^= np.arange(values.shape[1]) ^ ~_COLUMN
    return keys
