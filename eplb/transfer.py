"""Which weights have to be copied from where, to come from one plan to the next."""

import numpy as np
from numpy.typing import NDArray

from penstock.eplb.maps import Plan

Indices = NDArray[np.int64]


def transfers(old: Plan, new: Plan, ranks_per_node: int) -> Indices:
    """Rows (layer, expert, src_slot, dst_slot), one for every slot that gets another expert, by layer and dst_slot.

    A source holds the expert in the old plan. It is on the same rank where that has it, else on the same node, else
    anywhere; receivers take turns over the sources that are equally near. A rank takes an expert from one source
    only, also where it needs it in two slots.
    """
    _check_alike(old, new, ranks_per_node)
    layer, slot = np.nonzero(old.phy2log != new.phy2log)
    expert = new.phy2log[layer, slot].astype(np.int64)
    source = _local_sources(old, layer, expert, slot)
    away = np.nonzero(source < 0)[0]
    source[away] = _remote_sources(old, layer[away], expert[away], slot[away], ranks_per_node)
    return np.stack([layer, expert, source, slot], axis=1)


def _check_alike(old: Plan, new: Plan, ranks_per_node: int) -> None:
    for field in ("layers", "experts", "slots", "ranks"):
        if getattr(old, field) != getattr(new, field):
            raise ValueError(f"new: {getattr(new, field)} {field}, must be {getattr(old, field)} as in the old plan")
    if ranks_per_node < 1 or old.ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node: {ranks_per_node}, must divide the {old.ranks} ranks")


def _local_sources(old: Plan, layer: Indices, expert: Indices, slot: Indices) -> Indices:
    """A slot of the same rank that has the expert, else -1."""
    depth = old.slots_per_rank
    beside = old.phy2log.reshape(old.layers, old.ranks, depth)[layer, slot // depth]  # [rows, slots of the rank]
    same = beside == expert[:, None]
    which = same.argmax(1)
    found = same[np.arange(len(which)), which]
    return np.where(found, slot // depth * depth + which, -1)


def _remote_sources(old: Plan, layer: Indices, expert: Indices, slot: Indices, ranks_per_node: int) -> Indices:
    """A slot on the same node that has the expert, else any; taking turns. Copies are listed node by node."""
    num_nodes = old.ranks // ranks_per_node
    slots_per_node = old.slots // num_nodes
    at, holder_slot = np.divmod(np.arange(old.layers * old.slots), old.slots)
    holders = at * old.experts + old.phy2log.ravel()
    on_node = np.bincount(holders * num_nodes + holder_slot // slots_per_node, minlength=old.count.size * num_nodes)
    cell = layer * old.experts + expert
    near = cell * num_nodes + slot // slots_per_node
    num_near = on_node[near]
    first = np.where(num_near > 0, _before(on_node.reshape(-1, num_nodes))[near], 0)
    num = np.where(num_near > 0, num_near, old.count.ravel()[cell])
    # Receivers with the same sources take turns; slots of one rank are one receiver.
    turn = _turns(np.where(num_near > 0, near, -1 - cell), slot // old.slots_per_rank)
    return old.log2phy[layer, expert, first + turn % num].astype(np.int64)


def _before(counts: Indices) -> Indices:
    """How many copies of an expert lie on earlier nodes, flat."""
    return (np.cumsum(counts, axis=1) - counts).ravel()


def _turns(queue: Indices, rank: Indices) -> Indices:
    """The place of every receiver in its queue, in the order given; neighbours of one rank share a place."""
    by_queue = np.argsort(queue, kind="stable")
    queue, rank = queue[by_queue], rank[by_queue]
    opens = np.ones(len(queue), bool)
    opens[1:] = queue[1:] != queue[:-1]
    is_new = opens.copy()
    is_new[1:] |= rank[1:] != rank[:-1]
    number = np.cumsum(is_new)
    start = np.nonzero(opens)[0]
    turn = np.empty(len(queue), np.int64)
    turn[by_queue] = number - np.repeat(number[start], np.diff(start, append=len(queue)))
    return turn
