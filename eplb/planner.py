"""Computes plans from scratch: the number of copies of each expert, and the rank of each copy.

`replan` changes a plan that is in use.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb import order, pack
from penstock.eplb.load import check_shape, smooth, validate_load
from penstock.eplb.maps import Load, Plan, max_copies
from penstock.eplb.order import Ids, Indices, Shares

TOLERANCE = np.float32(1.8e-3)  # a row within this fraction of its bound is finished
_FINE = np.float32(1e-4)  # rows further away than this get one trade step: it is cheap and gains much


def plan(load: ArrayLike, slots: int, ranks: int) -> Plan:
    """Place `slots` copies of the experts of `load` [layers, experts] on `ranks`; copies of an expert share equally."""
    counts = validate_load(load)
    experts = counts.shape[1]
    check_shape(experts, slots, ranks)
    return Plan.of(assign_slots(smooth(counts), slots, ranks), experts, ranks)


def assign_slots(load: Shares, slots: int, ranks: int) -> Ids:
    """Return the expert in every slot, [layers, slots], for a smoothed load."""
    is_redundant = slots > load.shape[1]
    ids, shares = copies(load, slots, max_copies(load.shape[1], slots, ranks))
    floor = rank_load_bound(shares, ranks, is_redundant)
    deal = pack.deal_rounds if is_redundant or slots == ranks else pack.deal_singly
    bins = deal(ids, shares, ranks)
    pack.even_out(bins, floor * (1 + TOLERANCE), floor * (1 + _FINE), spread=is_redundant)
    return bins.slots()


def rank_load_bound(shares: Shares, ranks: int, is_redundant: bool) -> Shares:
    """Return a lower bound of each row's largest rank load. Without spare slots, the hottest expert shares its rank."""
    floor: Shares = np.maximum(shares.sum(1) / np.float32(ranks), shares[:, 0])
    if not is_redundant:
        coldest = shares[:, shares.shape[1] - shares.shape[1] // ranks + 1 :]
        floor = np.maximum(floor, shares[:, 0] + coldest.sum(1))
    return floor


def copies(load: Shares, slots: int, limit: int) -> tuple[Ids, Shares]:
    """Return the expert and the load share of every copy, largest share first: two arrays [rows, slots].

    `limit` is the maximum number of copies of one expert. Copies of an expert are next to each other.

    Each spare slot goes to the expert with the largest load per copy. This divisor method minimizes the largest share.
    Instead of a loop over spare slots, all are assigned at once: the k-th spare copy of an expert is worth load / k, so
    the spare slots go to the largest of these quotients.
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


def _counts(sorted_load: Shares, spare: int, limit: int) -> Indices:
    """Return the number of copies per expert, for experts sorted by descending load."""
    rows, experts = sorted_load.shape
    position, divisor = _candidates(spare, experts, limit)
    if len(position) > spare:
        chosen = position[order.largest(sorted_load[:, position] / divisor, spare)]
    else:
        chosen = np.broadcast_to(position, (rows, spare))
    cells = chosen + np.arange(rows)[:, None] * experts
    return 1 + np.bincount(cells.ravel(), minlength=rows * experts).reshape(rows, experts)


@cache
def _candidates(spare: int, experts: int, limit: int) -> tuple[Indices, Shares]:
    """Return (position by load, k) of every quotient that can be among the largest; the result depends only on sizes.

    The expert at position m by load can have its k-th quotient among the N largest only if (m + 1) · k ≤ N, because the
    k-th quotients of all experts before it are at least as large. About N · ln N candidates per layer remain.
    """
    position = np.arange(min(spare, experts))[:, None]
    divisor = np.arange(1, min(spare, limit - 1) + 1)
    where, which = np.nonzero((position + 1) * divisor <= spare)
    return where, divisor[which].astype(np.float32)


def bound(load: ArrayLike, slots: int, ranks: int) -> NDArray[np.float64]:
    """Return an upper bound on the balance of any plan, per layer; it need not be attainable.

    Some rank carries at least the mean load, and some copy at least the smallest possible largest share. Without spare
    slots, the rank of the hottest expert also holds at least the coldest other experts.
    """
    load = validate_load(load)
    layers, experts = load.shape
    check_shape(experts, slots, ranks)
    mean = load.sum(axis=1) / ranks
    least = _least_largest_share(load, slots, ranks)
    if slots == experts:
        least += np.sort(load, axis=1)[:, : slots // ranks - 1].sum(axis=1)
    floor = np.maximum(mean, least)
    best: NDArray[np.float64] = np.divide(mean, floor, out=np.ones(layers), where=floor > 0)
    return best


def _least_largest_share(load: Load, slots: int, ranks: int) -> NDArray[np.float64]:
    """Return the smallest possible largest copy load when spare slots are assigned; at most one copy per rank helps."""
    limit = max_copies(load.shape[1], slots, ranks)
    scale = np.where(load.max(axis=1) > 0, load.max(axis=1), 1)[:, None]
    ids = copies((load / scale).astype(np.float32), slots, limit)[0].astype(np.int64)
    rows = np.arange(len(load))[:, None] * load.shape[1]
    count = np.bincount((ids + rows).ravel(), minlength=load.size).reshape(load.shape)
    # The counts are optimal in float32; with a float64 load, the largest share may be one rounding error smaller.
    largest: NDArray[np.float64] = (load / np.minimum(count, ranks)).max(axis=1) * (1 - 2.0**-22)
    return largest
