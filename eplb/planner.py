"""Plans from scratch: how many copies, and which rank has which. `replan` changes a plan that is in use.

Three localities. *global*: a copy may lie anywhere. *group*: models that route a token to few groups of experts
keep a group on one node; each group then lies on one node with all copies of its experts, and balance is bounded
by how even groups are. *soft*: the first copy of every expert lies on its group's node, spare copies anywhere.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb import order, pack
from penstock.eplb.load import check_shape, checked, smooth
from penstock.eplb.maps import Load, Plan, max_copies
from penstock.eplb.order import Ids, Indices, Shares

TOLERANCE = np.float32(1.8e-3)  # a row at most this far above its bound is finished
_FINE = np.float32(1e-4)  # but one step is made for rows further away than this: it costs little and finds much
_FEW_SLOTS = 8  # with fewer, two ranks have too few pairs of slots for a good trade
_TRIES = 20, 4  # steps, and tries in each: rows left by now are few, so four tries cost as much as two steps


def plan(load: ArrayLike, slots: int, ranks: int, *, groups: int = 1, nodes: int = 1, locality: str = "global") -> Plan:
    """Place `slots` copies of the experts of `load` [layers, experts] on `ranks`, every copy with an even share."""
    counts = checked(load)
    experts = counts.shape[1]
    check_shape(experts, slots, ranks, groups, nodes, locality)
    phy2log = place(smooth(counts), slots, ranks, groups, nodes, locality)
    return Plan.of(phy2log, experts, ranks, groups=groups, nodes=nodes, locality=locality)


def place(load: Shares, slots: int, ranks: int, groups: int, nodes: int, locality: str) -> Ids:
    """The expert in every slot, [layers, slots], for a smoothed load."""
    if nodes == 1 or locality == "global":
        limit = max_copies(load.shape[1], slots, ranks)
        return _pack(*copies(load, slots, limit), ranks, slots > load.shape[1], 1).slots()
    at_home = _by_home(load, groups, nodes)
    if locality == "group" or slots == load.shape[1]:
        return _place_groups(load, at_home, slots, ranks, nodes)
    return _place_softly(load, at_home, slots, ranks, nodes)


def _pack(ids: Ids, shares: Shares, ranks: int, is_redundant: bool, nodes: int) -> pack.Bins:
    """Deal sorted copies to ranks. Rows are nodes of layers: those that are not their layer's heaviest may rest."""
    depth = ids.shape[1] // ranks
    floor = floor_of(shares, ranks, is_redundant).reshape(-1, nodes).max(1).repeat(nodes)
    goal = floor * (1 + TOLERANCE)
    bins = (pack.deal_rounds if is_redundant or depth == 1 else pack.deal_singly)(ids, shares, ranks)
    if is_redundant and depth < min(_FEW_SLOTS, ranks):
        pack.rematch(bins, floor * (1 + TOLERANCE / 2), pack.sweep(depth, ranks))
        pack.rematch(bins, goal, pack.neighbours(depth, ranks, *_TRIES))
    else:
        pack.even_out(bins, goal, floor * (1 + _FINE), spread=is_redundant)
    return bins


def floor_of(shares: Shares, ranks: int, is_redundant: bool) -> Shares:
    """What the heaviest rank of every row carries at best. Without spare copies the largest one is not alone."""
    floor: Shares = np.maximum(shares.sum(1) / np.float32(ranks), shares[:, 0])
    if not is_redundant:
        coldest = shares[:, shares.shape[1] - shares.shape[1] // ranks + 1 :]
        floor = np.maximum(floor, shares[:, 0] + coldest.sum(1))
    return floor


def _by_home(load: Shares, groups: int, nodes: int) -> Indices:
    """The experts, node by node: [layers, nodes, experts / nodes]. Nodes get equally many groups, evenly loaded."""
    layers, experts = load.shape
    by_group = load.reshape(layers, groups, -1).sum(2)
    heaviest = order.descending(by_group)
    sums = np.take_along_axis(by_group, heaviest, axis=1)
    # As published, and no better: evener groups left the hottest expert worse company than the published ones.
    at = pack.deal_singly(heaviest.astype(np.int16), sums, nodes).slots().astype(np.int64)
    members: Indices = at[:, :, None] * (experts // groups) + np.arange(experts // groups)
    return members.reshape(layers, nodes, -1)


def _place_groups(load: Shares, at_home: Indices, slots: int, ranks: int, nodes: int) -> Ids:
    """Every node plans for its own experts, all nodes of all layers at once."""
    layers, _, own = at_home.shape
    rows = np.take_along_axis(load, at_home.reshape(layers, -1), axis=1).reshape(-1, own)
    slots, ranks = slots // nodes, ranks // nodes
    ids, shares = copies(rows, slots, max_copies(own, slots, ranks))
    local = _pack(ids, shares, ranks, slots > own, nodes).slots()
    placed = np.take_along_axis(at_home.reshape(-1, own), local.astype(np.int64), axis=1)
    return placed.reshape(layers, -1).astype(np.int16)


def _place_softly(load: Shares, at_home: Indices, slots: int, ranks: int, nodes: int) -> Ids:
    """First copies go home, spare ones to the node that carries least; then every node deals to its ranks."""
    layers, experts = load.shape
    ids, shares = copies(load, slots, max_copies(experts, slots, ranks))
    is_first = np.ones(ids.shape, bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    spare = ids[~is_first].reshape(layers, -1), shares[~is_first].reshape(layers, -1)
    share = np.empty_like(load)
    np.put_along_axis(
        share, ids[is_first].reshape(layers, -1).astype(np.int64), shares[is_first].reshape(layers, -1), 1
    )
    content = _deal_spares(*spare, share, at_home, ranks // nodes)  # [layers, nodes, slots / nodes]
    cells = content + np.arange(0, load.size, experts)[:, None, None]
    count = np.bincount(cells.ravel(), minlength=load.size)
    content = np.sort(content, axis=2).reshape(layers * nodes, -1)  # copies side by side, also where shares tie
    each = (load.ravel() / count).astype(np.float32)
    rows = each[content + np.repeat(np.arange(0, load.size, experts), nodes)[:, None]]
    falling = order.descending(rows)
    content, rows = np.take_along_axis(content, falling, axis=1), np.take_along_axis(rows, falling, axis=1)
    return _pack(content.astype(np.int16), rows, ranks // nodes, True, nodes).slots().reshape(layers, slots)


def _deal_spares(ids: Ids, shares: Shares, share: Shares, at_home: Indices, ranks_per_node: int) -> Indices:
    """The experts of every node, first those at home, then spare copies: [layers, nodes, slots / nodes].

    A node takes no more copies of an expert than it has ranks. Where no node with a free slot may take a copy, the
    lightest such node gets one more of its own largest expert that has room there.
    """
    layers, nodes, own = at_home.shape
    layer, experts = np.arange(layers), share.shape[1]
    load = np.take_along_axis(share, at_home.reshape(layers, -1), axis=1).reshape(layers, nodes, own).sum(2)
    has = np.zeros((layers, nodes, experts), np.int16)
    np.put_along_axis(has, at_home, np.int16(1), axis=2)
    content = np.empty((layers, nodes, own + ids.shape[1] // nodes), np.int64)
    content[:, :, :own] = at_home
    filled = np.full((layers, nodes), own)
    for expert, weight in zip(ids.T.astype(np.int64), shares.T, strict=True):
        is_full = filled == content.shape[2]
        is_refused = is_full | (has[layer, :, expert] >= ranks_per_node)
        is_stuck = is_refused.all(1)
        node = np.where(is_refused & ~(is_stuck[:, None] & ~is_full), np.inf, load).argmin(1)
        expert = expert.copy()
        for row in np.nonzero(is_stuck)[0]:
            room = has[row, node[row]] < ranks_per_node
            expert[row] = np.where(room, share[row], -1).argmax()
        content[layer, node, filled[layer, node]] = expert
        filled[layer, node] += 1
        has[layer, node, expert] += 1
        load[layer, node] += weight
    return content


def copies(load: Shares, slots: int, limit: int) -> tuple[Ids, Shares]:
    """The experts of all copies and what each copy carries, largest share first: [rows, slots] twice.

    `limit` is the most copies an expert may have. Copies of one expert stand side by side.

    A spare slot always goes to the expert whose copies carry most; this is a divisor method and makes the largest
    share of any copy as small as it can be. Done one by one it is a loop over spare slots. Here all of them at once:
    giving the k-th spare copy relieves a share of load / k, so the spare slots go to the largest of these quotients.
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
def _candidates(spare: int, experts: int, limit: int) -> tuple[Indices, Shares]:
    """(position by load, k) of every quotient that may be among the largest; the same for every plan of a model.

    The expert that stands at position m by load can have one among the N largest only if (m + 1) · k ≤ N, because all
    before it have k quotients at least as large; about N · ln N candidates per layer remain.
    """
    position = np.arange(min(spare, experts))[:, None]
    divisor = np.arange(1, min(spare, limit - 1) + 1)
    where, which = np.nonzero((position + 1) * divisor <= spare)
    return where, divisor[which].astype(np.float32)


def bound(load: ArrayLike, slots: int, ranks: int) -> NDArray[np.float64]:
    """A balance per layer that no plan exceeds, however it splits load over copies. It need not be attainable.

    Some rank carries at least the mean, and some copy at least the smallest possible largest share. Without spare
    slots the hottest expert cannot be alone either: its rank has at least the coldest others beside it.
    """
    load = checked(load)
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
    """The largest load of a copy when spare slots are given out best; at most one copy per rank helps."""
    limit = max_copies(load.shape[1], slots, ranks)
    scale = np.where(load.max(axis=1) > 0, load.max(axis=1), 1)[:, None]
    ids = copies((load / scale).astype(np.float32), slots, limit)[0].astype(np.int64)
    rows = np.arange(len(load))[:, None] * load.shape[1]
    count = np.bincount((ids + rows).ravel(), minlength=load.size).reshape(load.shape)
    # The counts are best in float32; a copy of a float64 load may then be a rounding below them.
    largest: NDArray[np.float64] = (load / np.minimum(count, ranks)).max(axis=1) * (1 - 2.0**-22)
    return largest
