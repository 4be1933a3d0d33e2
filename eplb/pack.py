"""Bin packing of expert copies onto ranks of equal capacity with balanced loads and no duplicate expert on a rank.

Every function handles all rows (layers) at once and loops over slots or steps. The input is sorted by descending share,
with the copies of an expert next to each other. The result of a row depends only on that row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order
from penstock.eplb.order import Ids, Indices, Shares

_NEVER = np.float32(1e30)
# For each step, the offset between trade partners: a pair without a good trade may have one with another partner. Only
# layers that stay uneven reach the later steps, mostly many ranks of few slots (64 x 5: 0.992 of the bound after 8).
_SHIFTS = (0, 0, 0, *range(9), *range(4))
_LEAST_GAIN = np.float32(1e-3)  # as a fraction of the load gap between two ranks


@dataclass
class Bins:
    """The ranks being filled. The slot dimension comes first, so that each round writes contiguous memory."""

    ids: Ids  # [slots per rank, rows, ranks]
    shares: Shares  # [slots per rank, rows, ranks]
    load: Shares  # [rows, ranks]

    @classmethod
    def empty(cls, slots_per_rank: int, rows: int, ranks: int) -> "Bins":
        shape = slots_per_rank, rows, ranks
        return cls(np.empty(shape, np.int16), np.empty(shape, np.float32), np.zeros(shape[1:], np.float32))

    def slots(self) -> Ids:
        """Return the expert in every slot, ordered by rank: [rows, slots]."""
        return self.ids.transpose(1, 2, 0).reshape(self.load.shape[0], -1)


def deal_rounds(ids: Ids, shares: Shares, ranks: int) -> Bins:
    """Deal in rounds: each round gives every rank one copy, the heaviest copy to the least loaded rank.

    Only one expert can straddle two consecutive rounds, because its copies are next to each other. Its copies of the
    second round go to ranks that do not have it yet, so no rank gets an expert twice.
    """
    rows, depth = len(ids), ids.shape[1] // ranks
    bins = Bins.empty(depth, rows, ranks)
    blocks = np.ascontiguousarray(ids.reshape(rows, depth, ranks).swapaxes(0, 1))
    sizes = np.ascontiguousarray(shares.reshape(rows, depth, ranks).swapaxes(0, 1))
    straddles = (blocks[1:, :, 0] == blocks[:-1, :, -1]).any(1).tolist()
    base = np.arange(0, rows * ranks, ranks)[:, None]
    bins.ids[0], bins.shares[0] = blocks[0], sizes[0]
    bins.load += sizes[0]
    for slot in range(1, depth):
        lightest = order.roughly_ascending(bins.load)
        if straddles[slot - 1]:
            _keep_apart(lightest, bins.ids[slot - 1], blocks[slot], blocks[slot - 1, :, -1], bins.load)
        to = lightest + base
        bins.ids[slot].put(to, blocks[slot])
        bins.shares[slot].put(to, sizes[slot])
        bins.load += bins.shares[slot]
    return bins


def _keep_apart(lightest: NDArray[np.int32], before: Ids, block: Ids, last: Ids, load: Shares) -> None:
    """Reorder the ranks in rows where this round's first expert was also the last of the previous round."""
    rows = np.nonzero(block[:, 0] == last)[0]
    expert, load = block[rows, :1], load[rows]
    num_copies = (block[rows] == expert).sum(1)[:, None]
    free_first = order.roughly_ascending(np.where(before[rows] == expert, _NEVER, load))
    turn = np.empty_like(free_first)
    np.put_along_axis(turn, free_first, np.arange(load.shape[1], dtype=np.int32)[None], axis=1)
    # The least loaded ranks without the expert are served first, then all others by load.
    lightest[rows] = order.roughly_ascending(np.where(turn < num_copies, np.float32(0), load + np.float32(1)))


def deal_singly(ids: Ids, shares: Shares, ranks: int) -> Bins:
    """Deal one copy at a time, each to the least loaded rank with a free slot.

    Without spare copies the hottest ranks must end up with the coldest experts, which dealing in rounds cannot do.
    """
    rows, slots = ids.shape
    depth, plane = slots // ranks, rows * ranks
    bins = Bins.empty(depth, rows, ranks)
    base = np.arange(0, plane, ranks)
    load = np.zeros((rows, ranks), np.float32)  # infinite for ranks without a free slot
    flat_load = load.ravel()
    free = np.arange(plane)  # the next slot of every rank
    last = plane * (depth - 1)
    taken = np.empty((slots, rows), np.int64)
    for column, share in enumerate(np.ascontiguousarray(shares.T)):
        rank = load.argmin(1)
        rank += base
        slot = free[rank]
        taken[column] = slot
        flat_load[rank] += share
        if column >= depth - 1:
            flat_load[rank[slot >= last]] = np.inf
        slot += plane
        free[rank] = slot
    bins.ids.put(taken.T, ids)
    bins.shares.put(taken.T, shares)
    bins.load += bins.shares.sum(0)
    return bins


def even_out(bins: Bins, goal: Shares, wish: Shares, *, spread: bool) -> None:
    """Even out ranks of many slots by trading experts between pairs of ranks.

    All pairs trade at once: the heaviest rank with the lightest, the second heaviest with the second lightest, and so
    on. Each pair makes the trade that best evens out its loads; with nine slots each, about a hundredth of the gap
    remains. A row trades once if its heaviest rank is above `wish`, and again until it is at its `goal`. With `spread`,
    no rank receives an expert that it already has.
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


def _trade(ids: Ids, shares: Shares, load: Shares, at: Indices, shift: int, spread: bool) -> None:
    """Make one trade per pair in the rows `at`, in place; ids and shares: [rows, ranks, slots], load: [rows, ranks]."""
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
    left = gives[:, :, None] - takes[:, None, :]  # [pairs, slot of the heavy rank, slot of the light rank]
    left = np.abs(left, out=left).reshape(len(gap), -1)
    choice = left.argmin(1)
    do = np.nonzero(left[np.arange(len(gap)), choice] < gap * (1 - _LEAST_GAIN))[0]
    heavy, light = heavy[do], light[do]
    slot, other = np.divmod(choice[do], depth)
    slot += heavy * depth
    other += light * depth
    ids, shares = ids.reshape(-1), shares.reshape(-1)
    moved = shares[slot] - shares[other]
    for traded in (ids, shares):
        traded[slot], traded[other] = traded[other], traded[slot]
    load[heavy] -= moved
    load[light] += moved
