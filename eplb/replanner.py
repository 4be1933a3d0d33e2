"""Adapts a plan that is in use to a new load with few moves. Layers near their best balance stay as they are.

Each other layer goes through three stages and stops at the first that suffices: new weights for its copies, which moves
nothing; single changes (`search`); a plan from scratch, permuted so that as many experts as possible stay. The result
is then cut to `max_moves`: layers that gain most per move come first.
"""

import numpy as np
from numpy.typing import ArrayLike

from penstock.eplb.load import smooth
from penstock.eplb.maps import Load, Plan, Weights, evenness, validate_load_for
from penstock.eplb.order import Ids, Indices
from penstock.eplb.planner import assign_slots
from penstock.eplb.search import SearchedRows
from penstock.eplb.split import split

# Fitted weights improve on what single changes reach, so the search first aims this much below the target.
_MARGINS = (0.1, 0.05, 0.02, 0.0)
_WORTH = 0.02  # the least gain of balance for a plan from scratch, which moves most of the layer


def replan(load: ArrayLike, old: Plan, *, target: float = 0.96, max_moves: int | None = None) -> Plan:
    """Return `old` adapted to `load`; `old` itself if every layer has `target` of the balance that it can have.

    The balance of no layer decreases, and at most `max_moves` slots get another expert.
    """
    counts = validate_load_for(load, old)
    if not 0 < target <= 1:
        raise ValueError(f"target: {target}, must lie above 0 and not above 1")
    if max_moves is not None and max_moves < 0:
        raise ValueError(f"max_moves: {max_moves}, must be at least 0")
    draft = _Draft(counts, old, target)
    if not draft.below().size:
        return old
    draft.reweight(draft.below())
    limit = old.layers * old.slots if max_moves is None else max_moves
    if limit and old.ranks > 1:
        draft.search(np.full(old.layers, limit))
        draft.start_afresh()
        if draft.moves().sum() > limit:
            draft = _cut(draft, _Draft(counts, old, target), limit)
    return draft.plan()


class _Draft:
    """A plan being changed. Placement and weights of a layer change together, and only if its balance improves."""

    def __init__(self, load: Load, old: Plan, target: float) -> None:
        self.load, self.old, self.target = load, old, target
        self.smooth = smooth(load)
        self.rows = SearchedRows(old, self.smooth)
        self.phy2log, self.weight = old.phy2log.copy(), old.weight.copy()
        self.balance = evenness(load, old.phy2log, old.weight, old.ranks)
        self.goal = target * self.rows.reach

    def below(self) -> Indices:
        """Return the layers that are below their goal."""
        return np.nonzero(self.balance < self.goal)[0]

    def moves(self) -> Indices:
        """Return the number of slots per layer whose expert differs from the old plan."""
        changed: Indices = (self.phy2log != self.old.phy2log).sum(1)
        return changed

    def offer(self, layers: Indices, phy2log: Ids, weight: Weights, gain: float = 0.0) -> None:
        """Adopt these placements for the layers whose balance they improve by more than `gain`."""
        balance = evenness(self.load[layers], phy2log, weight, self.old.ranks)
        better = balance > self.balance[layers] + gain
        at = layers[better]
        self.phy2log[at], self.weight[at], self.balance[at] = phy2log[better], weight[better], balance[better]

    def offer_placed(self, layers: Indices, phy2log: Ids, gain: float = 0.0) -> None:
        """Offer new placements with weights fitted to the load, starting from equal shares."""
        weight = Plan.of(phy2log, self.old.experts, 1).weight  # equal shares, rounded as in a new plan
        self.offer(layers, phy2log, split(self.load[layers], phy2log, weight, self.old.ranks), gain)

    def reweight(self, layers: Indices) -> None:
        weight = split(self.load[layers], self.phy2log[layers], self.weight[layers], self.old.ranks)
        self.offer(layers, self.phy2log[layers], weight)

    def search(self, budget: Indices) -> None:
        """Make single changes, with a rising target, until the layers reach their goal or use up their budget."""
        placed = self.phy2log.copy()
        for margin in _MARGINS:
            layers = self.below()
            if not layers.size:
                return
            aim = max(self.target - margin, self.target / 2)
            left = budget[layers] - (placed[layers] != self.old.phy2log[layers]).sum(1)
            placed[layers] = self.rows.improve(layers, placed[layers], aim, left)
            self.offer_placed(layers, placed[layers])

    def start_afresh(self) -> None:
        """Try a plan from scratch for layers still below their goal; adopt it where it gains more than _WORTH."""
        layers = np.nonzero(self.balance < self.goal - _WORTH)[0]
        if layers.size:
            self.reweight(layers)  # so that gains of the weights alone are not credited to the plan from scratch
            fresh = assign_slots(self.smooth[layers], self.old.slots, self.old.ranks)
            self.offer_placed(layers, overlay(fresh, self.old.phy2log[layers], self.old.ranks), _WORTH)

    def plan(self) -> Plan:
        return self.old.with_(self.phy2log, self.weight)


def _cut(draft: _Draft, start: _Draft, limit: int) -> _Draft:
    """Reduce the draft to `limit` moves: layers by gain per move, the last one as far as the remaining moves allow."""
    start.reweight(start.below())
    moves, gain = draft.moves(), draft.balance - start.balance
    ranked = np.argsort(-gain / np.maximum(moves, 1), kind="stable")
    ranked = ranked[moves[ranked] > 0]
    fits = np.cumsum(moves[ranked]) <= limit
    chosen, rest = ranked[fits], ranked[~fits]
    start.offer(chosen, draft.phy2log[chosen], draft.weight[chosen])
    budget = np.zeros(len(moves), np.int64)
    budget[rest[:1]] = limit - moves[chosen].sum()
    last = rest[:1]
    if budget[last].any():
        placed = start.rows.improve(last, start.phy2log[last], start.target, budget[last])
        start.offer_placed(last, placed)
    return start


def overlay(new: Ids, old: Ids, ranks: int) -> Ids:
    """Return `new` [layers, slots] with its ranks and slots permuted to match `old`.

    The planner's ranks are interchangeable. Assigning each bin to the rank that already holds most of its experts, and
    leaving every expert that stays on its rank in its slot, saves moves and does not change the balance.
    """
    layers, slots = new.shape
    ours, theirs = new.reshape(layers, ranks, -1), old.reshape(layers, ranks, -1)
    named = np.take_along_axis(ours, _bins_of_ranks(ours, theirs)[:, :, None], axis=1)
    depth = slots // ranks
    return keep_slots(named.reshape(-1, depth), theirs.reshape(-1, depth)).reshape(layers, slots)


def _bins_of_ranks(new: Ids, old: Ids) -> Indices:
    """Return the new bin of every old rank, greedily by the number of common experts, in all rows at once."""
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
    """Return `new` with each row's experts in the slots that they have in `old`, the others in the remaining slots."""
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
    placed[placed < 0] = new[is_left]  # both masks have the same number per row, and both are in row order
    return placed
