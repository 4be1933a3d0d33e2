"""Trades between pairs of ranks: what evens out ranks that have many slots each.

All pairs of all rows that are not at their goal trade at once, the heaviest rank with the lightest, the next one with
the next. Of all pairs of their slots they take the one that comes nearest to making them even; with nine slots each
that leaves about a hundredth of their gap, so a few steps do what dealing offers anew does in dozens.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order
from penstock.eplb.pack import Bins
from penstock.eplb.replicas import Ids, Shares

_SHIFTS = 0, 0, 0, 0, 1, 2, 3, 4  # how far along partners are; who found no trade may find one with another
_NEVER = np.float32(1e30)
_LEAST_GAIN = np.float32(1e-3)  # of the gap between two ranks


def even_out(bins: Bins, goal: Shares, wish: Shares, *, spread: bool) -> None:
    """Trade once where the heaviest rank is above the row's wish, and on until it is at its goal.

    With `spread` no rank gets an expert that it has. A row rests for good once it is at its goal.
    """
    at = np.nonzero(bins.load.max(1) > wish)[0]
    if not at.size:
        return
    ids = np.ascontiguousarray(bins.ids.transpose(1, 2, 0))
    shares = np.ascontiguousarray(bins.shares.transpose(1, 2, 0))
    for shift in _SHIFTS:
        _trade(ids, shares, bins.load, at, shift, spread)
        at = at[bins.load[at].max(1) > goal[at]]
        if not at.size:
            break
    bins.ids, bins.shares = ids.transpose(2, 0, 1), shares.transpose(2, 0, 1)


def _trade(ids: Ids, shares: Shares, load: Shares, at: NDArray[np.int64], shift: int, spread: bool) -> None:
    """One step for the rows `at`, in place; ids and shares are [rows, ranks, slots], load [rows, ranks]."""
    ranks, depth = ids.shape[1:]
    by_load = order.roughly_ascending(load[at]) + (at * ranks)[:, None]
    pairs = np.arange(ranks // 2)
    heavy, light = by_load[:, ranks - 1 - pairs].ravel(), by_load[:, (pairs + shift) % len(pairs)].ravel()
    ids, shares, load = ids.reshape(-1, depth), shares.reshape(-1, depth), load.reshape(-1)
    gives, takes = shares.take(heavy, 0), shares.take(light, 0)
    if spread:
        same = np.flatnonzero(ids.take(heavy, 0)[:, :, None] == ids.take(light, 0)[:, None, :])
        gives.put(same // depth, _NEVER)
        takes.put(same // depth**2 * depth + same % depth, -_NEVER)
    gap = (load[heavy] - load[light]) * np.float32(0.5)
    takes += gap[:, None]
    left = gives[:, :, None] - takes[:, None, :]  # [pairs, slot of the heavy one, slot of the light one]
    left = np.abs(left, out=left).reshape(len(gap), -1)
    choice = left.argmin(1)
    do = np.nonzero(left[np.arange(len(gap)), choice] < gap * (1 - _LEAST_GAIN))[0]
    heavy, light = heavy[do], light[do]
    slot, other = np.divmod(choice[do], depth)
    slot += heavy * depth
    other += light * depth
    ids, shares = ids.reshape(-1), shares.reshape(-1)
    given = shares[slot] - shares[other]
    for traded in (ids, shares):
        traded[slot], traded[other] = traded[other], traded[slot]
    load[heavy] -= given
    load[light] += given
