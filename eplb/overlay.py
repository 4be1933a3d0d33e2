"""Laying a new placement over the old one: which rank is which, and which slot, is free to choose.

A planner deals copies to ranks without names. Naming the ranks so that each gets the bin that has most in common
with what it holds, and leaving every expert that stays on its rank in its slot, saves moves and changes no balance.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.eplb.replicas import Ids


def overlay(new: Ids, old: Ids, ranks: int, nodes: int = 1) -> Ids:
    """`new` [layers, slots] with its ranks (within nodes, when there are several) and slots permuted to match `old`."""
    layers, slots = new.shape
    depth = slots // ranks
    rows = layers * nodes
    ours, theirs = new.reshape(rows, ranks // nodes, depth), old.reshape(rows, ranks // nodes, depth)
    named = np.take_along_axis(ours, _bins_of_ranks(ours, theirs)[:, :, None], axis=1)
    return keep_slots(named.reshape(-1, depth), theirs.reshape(-1, depth)).reshape(layers, slots)


def _bins_of_ranks(new: Ids, old: Ids) -> NDArray[np.int64]:
    """The new bin of every old rank: again and again the pair with most in common, in all rows at once."""
    rows, ranks, depth = new.shape
    common = np.zeros((rows, ranks, ranks), np.int32)  # [row, old rank, new bin]
    for slot in range(depth):
        common += (old[:, :, slot, None, None] == new[:, None]).any(3)
    flat, row = common.reshape(rows, -1), np.arange(rows)
    bins = np.empty((rows, ranks), np.int64)
    for _ in range(ranks):
        rank, which = np.divmod(flat.argmax(1), ranks)
        bins[row, rank] = which
        common[row, rank] = -1
        common[row, :, which] = -1
    return bins


def keep_slots(new: Ids, old: Ids) -> Ids:
    """The experts of every row of `new` in the slots that they have in `old`; the others in the slots left over."""
    rows, depth = new.shape
    placed = np.full((rows, depth), -1, np.int16)
    is_left = np.ones((rows, depth), bool)
    row = np.arange(rows)
    for slot in range(depth):
        same = (new == old[:, slot, None]) & is_left
        which = same.argmax(1)
        stays = same[row, which]
        placed[row[stays], slot] = old[stays, slot]
        is_left[row[stays], which[stays]] = False
    placed[placed < 0] = new[is_left]  # as many of both in every row, and both row by row
    return placed
