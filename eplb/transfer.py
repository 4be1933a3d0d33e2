"""Lists the expert weights that have to be copied to change from one plan to another."""

import numpy as np

from penstock.eplb.maps import Plan
from penstock.eplb.order import Ids, Indices


def transfers(old: Plan, new: Plan, ranks_per_node: int | None = None) -> Indices:
    """Return rows (layer, expert, src_slot, dst_slot) for every slot that gets another expert, by layer and dst_slot.

    A source slot holds the expert in the old plan: on the same rank if possible, else on the same node (by default, all
    ranks are on one node), else anywhere. Receivers are spread over equally near sources. A rank receives an expert
    from one source only, even if it needs it in two slots.
    """
    per_node = old.ranks if ranks_per_node is None else ranks_per_node
    for field in ("layers", "experts", "slots", "ranks"):
        if getattr(old, field) != getattr(new, field):
            raise ValueError(f"new: {getattr(new, field)} {field}, must be {getattr(old, field)} as in the old plan")
    if per_node < 1 or old.ranks % per_node:
        raise ValueError(f"ranks_per_node: {per_node}, must divide the {old.ranks} ranks")
    at = np.flatnonzero(old.phy2log != new.phy2log)
    rows = np.empty((len(at), 4), np.int64)
    rows[:, 0], rows[:, 3] = np.divmod(at, old.slots)
    rows[:, 1], rows[:, 2] = new.phy2log.ravel()[at], _local_sources(old, new).ravel()[at]
    remote = np.flatnonzero(rows[:, 2] < 0)
    rows[remote, 2] = _remote_sources(old, rows[remote], old.ranks // per_node)
    return rows


def _local_sources(old: Plan, new: Plan) -> Ids:
    """Return, for every slot, a slot of the same rank that holds its new expert in the old plan, else -1."""
    depth = old.slots_per_rank
    held, wanted = (plan.phy2log.reshape(-1, depth) for plan in (old, new))  # [ranks of all layers, slots]
    which = np.full(held.shape, -1, np.int16)
    for slot in reversed(range(depth)):
        np.copyto(which, slot, where=wanted == held[:, slot, None])
    grid = which.reshape(old.layers, old.ranks, depth)
    return np.where(grid < 0, np.int16(-1), grid + np.arange(0, old.slots, depth, dtype=np.int16)[:, None])


def _remote_sources(old: Plan, rows: Indices, num_nodes: int) -> Indices:
    """Return the source slot of each row: on the same node if that holds the expert, else anywhere.

    Copies sorted by layer, expert and slot are also sorted by node within an expert, so the copies of an expert on one
    node are a contiguous run.
    """
    layer, expert, _, slot = rows.T
    copy = np.argsort(old.phy2log, axis=1, kind="stable")
    cells = np.take_along_axis(old.phy2log, copy, 1) + np.arange(0, old.count.size, old.experts)[:, None]
    runs = (cells * num_nodes + copy // (old.slots // num_nodes)).ravel()
    everywhere = (layer * old.experts + expert) * num_nodes
    near = everywhere + slot // (old.slots // num_nodes)
    first, end = np.searchsorted(runs, near), np.searchsorted(runs, near, "right")
    is_far = first == end
    first[is_far] = np.searchsorted(runs, everywhere[is_far])
    end[is_far] = np.searchsorted(runs, everywhere[is_far] + num_nodes)
    turn = _turns(2 * first + is_far, slot // old.slots_per_rank, old.ranks)
    sources: Indices = copy.ravel()[first + turn % (end - first)]
    return sources


def _turns(queue: Indices, rank: Indices, num_ranks: int) -> Indices:
    """Return the index of every receiver in its queue, by rank; slots of one rank share an index."""
    receivers, which = np.unique(queue * num_ranks + rank, return_inverse=True)
    queues = receivers // num_ranks
    turn: Indices = (np.arange(len(queues)) - np.searchsorted(queues, queues))[which]
    return turn
