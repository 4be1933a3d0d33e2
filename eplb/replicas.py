"""How many copies each expert gets, and the sorted list of copies that is then dealt to ranks.

A spare slot always goes to the expert whose copies carry most; this is a divisor method and makes the largest share
of any copy as small as it can be. Done one by one it is a loop over spare slots. Here all of them at once: giving
the k-th spare copy relieves a share of load / k, so the spare slots go to the largest of these quotients. The expert
that stands at position m by load can have a quotient among the N largest only if (m + 1) · k ≤ N, because everyone
before it has k quotients at least as large; about N · ln N candidates per layer remain.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order

Shares = NDArray[np.float32]
Ids = NDArray[np.int16]


def copies(load: Shares, slots: int, limit: int) -> tuple[Ids, Shares]:
    """The experts of all copies and what each copy carries, largest share first: [rows, slots] twice.

    `limit` is the most copies an expert may have. Copies of one expert stand side by side.
    """
    rows, experts = load.shape
    base = np.arange(rows)[:, None] * experts
    by_load = order.descending(load) + base
    sorted_load = load.ravel()[by_load]
    experts_of = (by_load - base).astype(np.int16)
    if slots == experts:
        return experts_of, sorted_load
    count = _counts(sorted_load, slots - experts, limit)
    share = (sorted_load / count).astype(np.float32)
    by_share = (order.descending(share) + base).ravel()
    repeats = count.ravel()[by_share]
    ids = np.repeat(experts_of.ravel()[by_share], repeats).reshape(rows, slots)
    return ids, np.repeat(share.ravel()[by_share], repeats).reshape(rows, slots)


def _counts(sorted_load: Shares, spare: int, limit: int) -> NDArray[np.int64]:
    """Copies per expert, with the experts in the order of falling load."""
    rows, experts = sorted_load.shape
    position, divisor = _candidates(spare, experts, limit)
    if len(position) > spare:
        chosen = position[order.largest(sorted_load[:, position] / divisor, spare)]
    else:
        chosen = np.broadcast_to(position, (rows, spare))
    cells = chosen + np.arange(rows)[:, None] * experts
    return 1 + np.bincount(cells.ravel(), minlength=rows * experts).reshape(rows, experts)


@cache
def _candidates(spare: int, experts: int, limit: int) -> tuple[NDArray[np.int64], Shares]:
    """(position by load, k) of every quotient that may be among the largest; the same for every plan of a model."""
    position = np.arange(min(spare, experts))[:, None]
    divisor = np.arange(1, min(spare, limit - 1) + 1)
    where, which = np.nonzero((position + 1) * divisor <= spare)
    return where, divisor[which].astype(np.float32)
