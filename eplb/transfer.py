"""Which weights have to be copied from where, to come from one plan to the next."""

import numpy as np

from penstock.eplb.maps import Plan
from penstock.eplb.order import Ids, Indices


def transfers(old: Plan, new: Plan, ranks_per_node: int) -> Indices:
    """Rows (layer, expert, src_slot, dst_slot), one for every slot that gets another expert, by layer and dst_slot.

    A source holds the expert in the old plan. It is on the same rank where that has it, else on the same node, else
    anywhere; receivers take turns over the sources that are equally near. A rank takes an expert from one source
    only, also where it needs it in two slots.
    """
    _check_alike(old, new, ranks_per_node)
    at = np.flatnonzero(old.phy2log != new.phy2log)
    source = _beside(old, new).ravel()[at]
    wanted = np.empty((len(at), 4), np.int64)
    wanted[:, 0], wanted[:, 3] = np.divmod(at, old.slots)
    wanted[:, 1], wanted[:, 2] = new.phy2log.ravel()[at], source
    away = np.flatnonzero(source < 0)
    wanted[away, 2] = _remote_sources(old, at[away], wanted[away, 1], old.ranks // ranks_per_node)
    return wanted


def _check_alike(old: Plan, new: Plan, ranks_per_node: int) -> None:
    for field in ("layers", "experts", "slots", "ranks"):
        if getattr(old, field) != getattr(new, field):
            raise ValueError(f"new: {getattr(new, field)} {field}, must be {getattr(old, field)} as in the old plan")
    if ranks_per_node < 1 or old.ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node: {ranks_per_node}, must divide the {old.ranks} ranks")


def _beside(old: Plan, new: Plan) -> Ids:
    """For every slot one of the same rank that has in the old plan what the slot has in the new one, else -1."""
    depth = old.slots_per_rank
    held, wanted = (plan.phy2log.reshape(-1, depth) for plan in (old, new))  # [ranks of all layers, slots]
    which = np.full(held.shape, -1, np.int16)
    for slot in reversed(range(depth)):
        np.copyto(which, slot, where=wanted == held[:, slot, None])
    first = np.arange(0, old.slots, depth, dtype=np.int16)[:, None]
    grid = which.reshape(old.layers, old.ranks, depth)
    return np.where(grid < 0, np.int16(-1), grid + first)


def _remote_sources(old: Plan, at: Indices, expert: Indices, num_nodes: int) -> Ids:
    """For slots that lie `at` these places of all layers' slots: a slot on the same node that has the expert, else any.

    All copies in a row, expert by expert and by slot, stand node by node too: those on a node are a run of them.
    """
    slots_per_node = old.slots // num_nodes
    copy = np.argsort(old.phy2log, axis=1, kind="stable").astype(np.int16)  # slots in a row
    experts = np.arange(0, old.count.size, old.experts, dtype=np.int32)[:, None]
    run = (np.take_along_axis(old.phy2log, copy.astype(np.int64), 1) + experts) * num_nodes + copy // slots_per_node
    run = run.ravel()
    is_first = np.ones(len(run), bool)
    is_first[1:] = run[1:] != run[:-1]
    first = np.flatnonzero(is_first)
    which = np.full(old.count.size * num_nodes, -1, np.int32)  # of the runs, by expert and node
    which[run[first]] = np.arange(len(first))
    layer, slot = np.divmod(at, old.slots)
    cell = layer * old.experts + expert
    near = which[cell * num_nodes + slot // slots_per_node]
    count = old.count.ravel()
    is_near = near >= 0
    start = np.where(is_near, first[near], (np.cumsum(count) - count)[cell])
    num = np.where(is_near, np.diff(first, append=len(run))[near], count[cell])
    # Receivers with the same sources take turns; slots of one rank are one receiver.
    turn = _turns(2 * start + is_near, slot // old.slots_per_rank)
    return copy.ravel()[start + turn % num]


def _turns(queue: Indices, rank: Indices) -> Indices:
    """The place of every receiver in its queue, in the order given; neighbours of one rank share a place."""
    bits = len(queue).bit_length()
    keys = queue << bits | np.arange(len(queue))  # no two are alike: any sort is a stable one
    keys.sort()
    by_queue = keys & ((1 << bits) - 1)
    queue, rank = keys >> bits, rank[by_queue]
    opens = np.ones(len(queue), bool)
    opens[1:] = queue[1:] != queue[:-1]
    is_new = opens.copy()
    is_new[1:] |= rank[1:] != rank[:-1]
    number = np.cumsum(is_new)
    turn = np.empty(len(queue), np.int64)
    turn[by_queue] = number - np.maximum.accumulate(number * opens)
    return turn
