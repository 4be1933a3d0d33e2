"""Dealing copies to ranks so that the ranks carry alike: exactly S copies each, no expert twice on one rank.

Every function works on all rows (layers, or nodes of layers) at once; loops run over slots or steps, never over
rows times copies. What it packs is sorted, largest share first, with copies of one expert side by side. A row's
result depends on that row alone, so layers can be planned together or one by one.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order
from penstock.eplb.replicas import Ids, Shares

_NEVER = np.float32(3e38)
_STEPS_BETWEEN_LOOKS = 8


@dataclass
class Bins:
    """Ranks being filled. Slot-major, so that one round is one contiguous stretch."""

    ids: Ids  # [slots per rank, rows, ranks]
    shares: Shares  # [slots per rank, rows, ranks]
    load: Shares  # [rows, ranks]

    @classmethod
    def empty(cls, slots_per_rank: int, rows: int, ranks: int) -> "Bins":
        shape = slots_per_rank, rows, ranks
        return cls(np.empty(shape, np.int16), np.empty(shape, np.float32), np.zeros(shape[1:], np.float32))

    def slots(self) -> Ids:
        """The expert in every slot, rank by rank: [rows, slots]."""
        return self.ids.transpose(1, 2, 0).reshape(self.load.shape[0], -1)


def deal_rounds(ids: Ids, shares: Shares, ranks: int) -> Bins:
    """Each round deals one copy to every rank, the heaviest copy to the lightest rank.

    Only one expert per round can also have been in the round before, because its copies stand side by side. It
    goes to ranks that do not have it yet, so no rank gets an expert twice.
    """
    rows, slots = ids.shape
    bins = Bins.empty(slots // ranks, rows, ranks)
    base = np.arange(rows)[:, None] * ranks
    load = bins.load.ravel()
    for slot in range(slots // ranks):
        start = slot * ranks
        block, share = ids[:, start : start + ranks], shares[:, start : start + ranks]
        if slot == 0:
            to = base + np.arange(ranks)
        else:
            lightest = order.ascending(bins.load)
            _keep_apart(lightest, bins.ids[slot - 1], block, ids[:, start - 1], bins.load)
            to = lightest + base
        bins.ids[slot].ravel()[to] = block
        bins.shares[slot].ravel()[to] = share
        load += bins.shares[slot].ravel()
    return bins


def _keep_apart(lightest: NDArray[np.int64], before: Ids, block: Ids, last: Ids, load: Shares) -> None:
    """Where the expert that opens this round also closed the last one, rewrite the order in which ranks are served."""
    rows = np.nonzero(block[:, 0] == last)[0]
    if not rows.size:
        return
    expert, load = block[rows, :1], load[rows]
    num_copies = (block[rows] == expert).sum(1)[:, None]
    free_first = order.ascending(np.where(before[rows] == expert, _NEVER, load))
    turn = np.empty_like(free_first)
    np.put_along_axis(turn, free_first, np.arange(load.shape[1])[None], axis=1)
    # The lightest ranks without the expert are served first, all others after them by load.
    lightest[rows] = order.ascending(np.where(turn < num_copies, np.float32(0), load + np.float32(1)))


def deal_singly(ids: Ids, shares: Shares, ranks: int) -> Bins:
    """Each copy to the lightest rank that has a slot left, one column after the other.

    With no spare copies the hottest ranks must end up with the coldest experts, which rounds cannot do.
    """
    rows, slots = ids.shape
    bins = Bins.empty(slots // ranks, rows, ranks)
    flat_ids, flat_shares = bins.ids.ravel(), bins.shares.ravel()
    base, plane = np.arange(rows) * ranks, rows * ranks
    load = np.zeros((rows, ranks), np.float32)  # of ranks that have a slot left; a full one counts as infinite
    flat_load = load.ravel()
    free = np.arange(plane)  # the next slot of every rank
    last = free + plane * (slots // ranks - 1)
    for column, (expert, share) in enumerate(zip(ids.T.copy(), shares.T.copy(), strict=True)):
        rank = load.argmin(1) + base
        slot = free[rank]
        flat_ids[slot] = expert
        flat_shares[slot] = share
        flat_load[rank] += share
        free[rank] = slot + plane
        if column >= slots // ranks - 1:
            flat_load[rank[slot == last[rank]]] = np.inf
    bins.load = bins.shares.sum(0)
    return bins


def rematch(bins: Bins, goal: Shares, offers: NDArray[np.int64], *, spread: bool) -> None:
    """Every rank offers one slot; the offers are dealt anew, the largest to the rank that is lightest without its own.

    `offers` says which slot every rank offers in every step: [steps, ranks]. A row takes the result where its
    heaviest rank gets lighter (and, with `spread`, where no rank gets an expert twice), and rests for good once it
    is at its goal. Rows that rest are left out after every few steps, so the stubborn ones cost little.
    """
    active = np.nonzero(bins.load.max(1) > goal)[0]
    for start in range(0, len(offers), _STEPS_BETWEEN_LOOKS):
        if not active.size:
            return
        # take, unlike indexing, always gives contiguous arrays, which the flat views in _offer need
        part = Bins(bins.ids.take(active, 1), bins.shares.take(active, 1), bins.load[active])
        for offer in offers[start : start + _STEPS_BETWEEN_LOOKS]:
            _offer(part, offer, goal[active], spread)
        bins.ids[:, active], bins.shares[:, active], bins.load[active] = part.ids, part.shares, part.load
        active = active[part.load.max(1) > goal[active]]


@cache
def sweep(depth: int, ranks: int) -> NDArray[np.int64]:
    """Offers: all ranks offer the same slot, each slot once. Enough for most rows."""
    return np.broadcast_to(np.arange(1, depth + 1)[:, None] % depth, (depth, ranks))


@cache
def neighbours(depth: int, ranks: int, steps: int) -> NDArray[np.int64]:
    """Offers: slots filled in the same round or the ones beside it, so that shares are alike and fit each other."""
    jitter = np.random.default_rng(0).integers(-1, 2, (steps, ranks))  # seeded: a plan is a function of its input
    return (np.arange(steps)[:, None] % depth + jitter).clip(0, depth - 1)


@cache
def anything(depth: int, ranks: int, steps: int) -> NDArray[np.int64]:
    """Offers: any slot. Where ranks were filled singly, slots of one depth are not alike."""
    return np.random.default_rng(0).integers(0, depth, (steps, ranks))


def _offer(bins: Bins, offer: NDArray[np.int64], goal: Shares, spread: bool) -> None:
    """One step of `rematch`, in place."""
    rows, ranks = bins.load.shape
    base = np.arange(0, rows * ranks, ranks)[:, None]
    cells = base + (offer * (rows * ranks) + np.arange(ranks))  # [rows, ranks], into the flat slots
    share = bins.shares.take(cells)
    rest = bins.load - share
    to, what = order.ascending(rest), order.descending(share)
    to += base
    what += base
    share = share.take(what)
    load = rest.take(to)
    load += share
    heaviest = bins.load.max(1)
    better = load.max(1) < heaviest
    better &= heaviest > goal
    expert = np.empty((rows, ranks), np.int16)
    expert.put(to, bins.ids.take(cells).take(what))
    if spread:
        twice = bins.ids == expert
        twice.put(cells, False)
        better &= ~twice.any((0, 2))
    row = np.nonzero(better)[0]
    if row.size:
        taken = np.empty((rows, ranks), np.float32)
        taken.put(to, share)
        bins.shares.put(cells[row], taken[row])
        bins.ids.put(cells[row], expert[row])
        bins.load.put(to[row], load[row])
